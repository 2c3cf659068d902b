"""The trainer: one process per rank, FSDP2 over them, decoupled PPO inside. Importing this package imports no torch."""
