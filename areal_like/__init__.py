"""areal_like: asynchronous reinforcement learning for language models, exact about staleness."""

__version__ = "0.1.0"
