"""Methods that vLLM's ``--worker-extension-cls`` adds to every worker; ``/collective_rpc`` calls them."""

from __future__ import annotations

from typing import Any

from areal_like.inference.vllm_plugin.engine import StagedTransferEngine


class UpdateExtension:
    """Mixed into the worker: ``self`` has vLLM's attributes."""

    weight_transfer_engine: Any
    _weight_update_active: bool

    def areal_like_status(self) -> dict[str, Any]:
        """What this worker holds and what it is staging; answers at once."""
        return self._areal_like_engine().status()

    def areal_like_discard(self) -> dict[str, Any]:
        """Give up an update that was begun and not applied, so that another can begin."""
        engine = self._areal_like_engine()
        engine.discard()
        self._weight_update_active = False
        return engine.status()

    def _areal_like_engine(self) -> StagedTransferEngine:
        engine = self.weight_transfer_engine
        if not isinstance(engine, StagedTransferEngine):
            raise RuntimeError("this server was started without our --weight-transfer-config")
        return engine
