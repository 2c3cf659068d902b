"""Methods that vLLM's ``--worker-extension-cls`` adds to every worker; ``/collective_rpc`` calls them.

A publication costs few of them, since each waits for its turn in a busy server:

    stage --> (status, until it is staged) --> begin --> vLLM's pause, finish_weight_update, resume --> status

vLLM's ``finish_weight_update`` names no version, and fails outside of a session. So a session is open only from
``begin``, which names what it is for, to ``finish``, and a staging closes it: nobody's ``finish`` loads what another
has staged meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from areal_like.api.weights import Manifest
from areal_like.errors import ArealLikeError, StaleCommand
from areal_like.weights.transports.base import stays_on_gpus

if TYPE_CHECKING:
    from areal_like.inference.vllm_plugin.engine import StagedTransferEngine

#: seconds that a stage call waits for staging to end, between two looks and in all. Between GPUs no bytes travel before
#: the pause, so it ends soon; asking again would cost more than the step of the model that is held up
_LOOK, _PATIENCE = 0.0005, 0.01


class UpdateExtension:
    """Mixed into the worker: ``self`` has vLLM's attributes and methods."""

    weight_transfer_engine: Any
    vllm_config: Any
    device: Any
    _weight_update_active: bool

    def areal_like_status(self) -> dict[str, Any]:
        """What this worker holds and what it is staging; answers at once."""
        return {**self._areal_like_engine().status(), **self._areal_like_settings()}

    def areal_like_stage(self, manifest: str, server: str) -> dict[str, Any]:
        """Give up what was begun, and begin to fetch ``manifest`` (JSON). ``server``: our server's name in the run.

        The status, with ``refused`` where it does not fit the model, or is older than what is loaded: then nothing is
        given up.
        """
        wanted, refused = Manifest.model_validate_json(manifest), ""
        try:
            self._areal_like_fetch(wanted, {"manifest": manifest, "server": server})
        except ArealLikeError as error:
            refused = str(error)
        return {**self.areal_like_status(), "refused": refused}

    def areal_like_begin(self, incarnation: str, version: str) -> dict[str, Any]:
        """Open vLLM's session for this version, if it is staged. The status, with ``refused`` where it is not.

        A version that is loaded already needs no session, and is not refused.
        """
        status, named, refused = self.areal_like_status(), (int(incarnation), int(version)), ""
        if status["state"] == "staged" and (status["staged_incarnation"], status["staged_version"]) == named:
            self._weight_update_active = False  # of a commit that was broken off
            self.start_weight_update()  # type: ignore[attr-defined]
        elif status["state"] != "applied" or (status["incarnation"], status["version"]) != named:
            refused = f"version {version} of incarnation {incarnation} is not staged"
        return {**status, "refused": refused}

    def _areal_like_fetch(self, wanted: Manifest, told: Mapping[str, str]) -> None:
        """Raises StaleCommand or WeightUpdateError."""
        engine = self._areal_like_engine()
        now = engine.status()
        if (wanted.incarnation, wanted.version) < (now["incarnation"], now["version"]):
            raise StaleCommand(
                f"stage of version {wanted.version} of incarnation {wanted.incarnation}, and version {now['version']} "
                f"of {now['incarnation']} is loaded"
            )
        self._weight_update_active = False  # of an update that somebody broke off
        self.start_weight_update()  # type: ignore[attr-defined]
        try:
            self.update_weights(dict(told))  # type: ignore[attr-defined]
        finally:
            self._weight_update_active = False
        deadline = time.monotonic() + (_PATIENCE if stays_on_gpus(wanted) else 0.0)
        while engine.status()["state"] == "staging" and time.monotonic() < deadline:
            time.sleep(_LOOK)

    def _areal_like_settings(self) -> dict[str, Any]:
        """What the contract asks of a server's flags, whoever started it."""
        config = self.vllm_config
        chunked = bool(config.scheduler_config.enable_chunked_prefill)
        sleeps = bool(config.model_config.enable_sleep_mode) and self.device.type != "cpu"
        return {
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "seeds": not (chunked and self.device.type == "cpu"),
            "sleeps": sleeps,
            "asleep": asleep() if sleeps else [],
        }

    def _areal_like_engine(self) -> StagedTransferEngine:
        from areal_like.inference.vllm_plugin.engine import StagedTransferEngine

        engine = self.weight_transfer_engine
        if not isinstance(engine, StagedTransferEngine):
            raise RuntimeError("this server was started without our --weight-transfer-config")
        return engine


def asleep() -> list[str]:
    """What of this process' device memory vLLM's allocator has given away: ``weights``, ``kv_cache``."""
    from vllm.device_allocator import get_mem_allocator_instance

    allocations = get_mem_allocator_instance().pointer_to_data.values()
    return sorted({found.tag for found in allocations if found.is_asleep})
