"""Methods that vLLM's ``--worker-extension-cls`` adds to every worker; ``/collective_rpc`` calls them."""

from __future__ import annotations

from typing import Any

from areal_like.inference.vllm_plugin.engine import StagedTransferEngine


class UpdateExtension:
    """Mixed into the worker: ``self`` has vLLM's attributes."""

    weight_transfer_engine: Any
    vllm_config: Any
    device: Any
    _weight_update_active: bool

    def areal_like_status(self) -> dict[str, Any]:
        """What this worker holds and what it is staging; answers at once."""
        return {**self._areal_like_engine().status(), **self._areal_like_settings()}

    def areal_like_discard(self) -> dict[str, Any]:
        """Give up an update that was begun and not applied, so that another can begin."""
        engine = self._areal_like_engine()
        engine.discard()
        self._weight_update_active = False
        return self.areal_like_status()

    def _areal_like_settings(self) -> dict[str, Any]:
        """What the contract asks of a server's flags, whoever started it."""
        config = self.vllm_config
        chunked = bool(config.scheduler_config.enable_chunked_prefill)
        return {
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "seeds": not (chunked and self.device.type == "cpu"),
            "sleeps": bool(config.model_config.enable_sleep_mode) and self.device.type != "cpu",
        }

    def _areal_like_engine(self) -> StagedTransferEngine:
        engine = self.weight_transfer_engine
        if not isinstance(engine, StagedTransferEngine):
            raise RuntimeError("this server was started without our --weight-transfer-config")
        return engine
