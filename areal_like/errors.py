"""The exception tree. Every message says where, the rule, what came, and what to do next."""

from __future__ import annotations


class ArealLikeError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(ArealLikeError):
    """The experiment file, a dataset or a dotted path is wrong. Found before any process starts; exit code 2."""


class RequestError(ArealLikeError):
    """A generation request that can never succeed (HTTP 4xx). Final: it is not retried."""


class InfrastructureError(ArealLikeError):
    """A server, worker or socket failed. The work may be retried elsewhere; it never becomes a reward."""


class ServerUnavailable(InfrastructureError):
    """One inference server did not answer in time, refused the connection or died."""


class ServerBusy(ServerUnavailable):
    """The server answers, and asks to come back later (503, 429): no failure of it."""


class ServersTaken(InfrastructureError):
    """Every inference server of the run serves another run by now, which joined later and took them over."""


class NoServerAvailable(InfrastructureError):
    """No server of the pool is in rotation within the deadline."""


class WeightUpdateError(InfrastructureError):
    """A weight update could not be staged, committed or verified."""


class ReachedNoServer(WeightUpdateError):
    """A version was exported, and no server serves it: none is left, or each failed. One may come back and get it."""


class StaleCommand(InfrastructureError):
    """A control call carried an older (incarnation, version) than the receiver has seen."""


class RpcError(InfrastructureError):
    """A train worker did not answer before the deadline, or the connection broke."""


class RemoteError(ArealLikeError):
    """A train worker's method raised. Carries the remote exception's type name and traceback text."""

    def __init__(self, message: str, *, remote_type: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback


class ProcessDied(InfrastructureError):
    """A process of the run ended although the run still needed it."""


class EpisodeError(ArealLikeError):
    """A workflow broke its contract (for example arrays of unequal length in a trajectory)."""


class RewardError(EpisodeError):
    """The user's reward function raised, returned no finite number, or ran past its time limit."""


class BreakerTripped(ArealLikeError):
    """Episodes keep failing; the run ends with the exception that was seen most often."""


class RolloutsEnded(ArealLikeError):
    """A batch was asked for that will never come: rollouts were stopped, or (PromptsExhausted) nothing is left."""


class PromptsExhausted(RolloutsEnded):
    """A batch was asked for that will never come: the prompts or the steps are used up. All work is done."""
