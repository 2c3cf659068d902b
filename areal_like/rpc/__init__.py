"""Remote calls between the processes of a run: msgpack and raw buffers over ZeroMQ, at most once. Imports no torch."""
