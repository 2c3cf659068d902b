"""How a new version travels from the trainer to every server. Importing this package imports no torch."""
