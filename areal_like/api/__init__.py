"""Types that cross a seam. Imports no torch."""

from areal_like.api.engine import InferenceEngine
from areal_like.api.generation import GenerationHyperparameters, ModelRequest, ModelResponse, StopReason
from areal_like.api.trajectory import Trajectory
from areal_like.api.workflow import EpisodeResult, RewardFunction, RolloutWorkflow, Tokenizer

__all__ = [
    "EpisodeResult",
    "GenerationHyperparameters",
    "InferenceEngine",
    "ModelRequest",
    "ModelResponse",
    "RewardFunction",
    "RolloutWorkflow",
    "StopReason",
    "Tokenizer",
    "Trajectory",
]
