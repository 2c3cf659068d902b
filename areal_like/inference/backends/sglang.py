"""SGLang >= 0.5.19, the first that tells which weights wrote each token; over process groups from 0.5.21.

Weights reach it from folders (``disk``, and ``shm`` through a folder in shared memory), or over its own weight-update
groups (``collective``). ``update_weights_from_tensor`` and ``_from_ipc`` are never used: they carry pickles.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
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
from areal_like.inference.backends.http_control import running_version
from areal_like.inference.backends.sglang_control import SglangControl
from areal_like.inference.backends.sglang_dialect import LEAST_TEMPERATURE, SglangDialect
from areal_like.inference.backends.sglang_group import GroupLoad
from areal_like.inference.backends.sglang_load import FolderLoad
from areal_like.inference.backends.sglang_memory import NEEDS as MEMORY_NEEDS
from areal_like.inference.backends.sglang_server import FIXED, ServerState
from areal_like.inference.spec import EngineSpec

OLDEST = (0, 5, 19)
#: the first version whose updates over a group are one session: begin, load, end
GROUPS_SINCE = (0, 5, 21)
#: transports that bring folders
_FOLDERS = frozenset({TransportKind.DISK, TransportKind.SHM})
_SERVE = Path(__file__).parent.parent / "sglang_plugin" / "serve.py"
#: tokens at the end of the context that SGLang keeps to itself
_RESERVED = 6
#: told by other keys of the experiment
_ELSEWHERE: Mapping[str, str] = {
    "host": "rollout.host",
    "port": "rollout.port",
    "model_path": "model.path",
    "model": "model.path",
    "device": "rollout.device",
    "dtype": "model.dtype",
    "api_key": "nothing: the run makes its own token",
    "admin_api_key": "nothing: the run makes its own token",
    "tensor_parallel_size": "rollout.backend (sglang:d1t2)",
    "tp_size": "rollout.backend (sglang:d1t2)",
    "pipeline_parallel_size": "rollout.backend (sglang:d1t1p2)",
    "pp_size": "rollout.backend (sglang:d1t1p2)",
    "max_running_requests": "rollout.max_batch_size",
    "context_length": "rollout.context_length",
    "random_seed": "seed",
    "weight_version": "nothing: versions are published",
}
#: other names that SGLang has for flags of the tables here
_SYNONYMS: Mapping[str, str] = {"data_parallel_size": "dp_size", "enable_hicache": "enable_hierarchical_cache"}
#: SGLang's flags whose names are the beginning of one that we set
_WHOLE = frozenset({"log_level"})
#: with these SGLang ends a while after a start on a CPU, and why
_GPU_ONLY: Mapping[str, str] = {
    "enable_memory_saver": "SGLang releases memory on GPUs only",
    "enable_weights_cpu_backup": "SGLang releases memory on GPUs only",
    "enable_deterministic_inference": "SGLang has its seeded sampling on GPUs only",
}
#: a CPU has neither SGLang's kernels nor graphs, and an idle scheduler would keep one of its cores busy
_CPU_DEFAULTS: Mapping[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "max_total_tokens": 16384,
    "sleep_on_idle": True,
    "watchdog_timeout": 3600,  # it ends a server whose step takes minutes: where memory is short that is no hang
    "mem_fraction_static": 0.95,  # of what is free, which others change while it loads; tokens are the limit
}


class SglangBackend:
    """:class:`EngineBackend`."""

    name = "sglang"
    package = ("sglang",)
    needs_us = False
    least_temperature = LEAST_TEMPERATURE

    def check_interrupt(self, mode: InterruptMode, flags: Mapping[str, Any]) -> None:
        if mode is InterruptMode.KEEP and not flags.get("disable_overlap_schedule", True):
            raise ConfigError(
                "rollout.interrupt: 'keep' needs sglang.disable_overlap_schedule: true: a scheduler that runs ahead "
                "labels the token that it is computing at a pause with the weights that come after it; leave the flag "
                "out, or use recompute or drain"
            )

    def capabilities(self, version: str) -> Capabilities:
        found = version_tuple(version)
        if found < OLDEST:
            raise ConfigError(
                f"SGLang {version} is too old: it does not tell which weights wrote a token; use 0.5.19 or newer"
            )
        groups = found >= GROUPS_SINCE
        return Capabilities(
            engine="SGLang",
            version=version,
            interrupts=frozenset(InterruptMode),
            transports=_FOLDERS | {TransportKind.COLLECTIVE} if groups else _FOLDERS,  # its ipc carries pickles
            spans=True,
            seeds="repeats only with sglang.enable_deterministic_inference: true, on a GPU",
            memory=MEMORY_NEEDS,
            since={} if groups else {f"transport={TransportKind.COLLECTIVE}": "0.5.21"},
        )

    async def version(self, url: str, *, token: str, timeout: float) -> str:
        return await running_version("SGLang", f"{url}/server_info", token=token, timeout=timeout)

    def connect(self, name: str, url: str, settings: LinkSettings) -> ServerLink:
        state = ServerState()
        load = GroupLoad() if settings.transport is TransportKind.COLLECTIVE else FolderLoad(name)
        control = SglangControl(name, url, state, load, token=settings.token)
        return ServerLink(control=control, dialect=SglangDialect(state))

    def command(self, spec: EngineSpec, *, token: str) -> EngineCommand:
        on_cpu = spec.devices == ("cpu",)
        ours: dict[str, Any] = {
            "model_path": spec.model_path,
            "host": spec.host,
            "port": spec.port,
            "device": "cpu" if on_cpu else "cuda",
            "dtype": spec.dtype,
            "random_seed": spec.seed,
            "max_running_requests": spec.max_batch_size,
            "context_length": _context_length(spec),
            "tensor_parallel_size": spec.tensor,
            "pipeline_parallel_size": spec.pipeline,
            "grammar_backend": "none",
            "disable_overlap_schedule": True,  # exact versions under interrupt=keep
            "load_snapshot_publish_interval": 1,  # /v1/loads tells what runs now, not fifteen steps ago
            "skip_server_warmup": True,
            "log_level_http": "warning",
            **(_CPU_DEFAULTS if on_cpu else {}),
        }
        _check_flags(spec.flags, ours=ours, on_cpu=on_cpu)
        ours |= {plain: value for name, value in spec.flags.items() if (plain := _plain(name)) not in FIXED}
        # a flag that is False is left out: SGLang has no such form
        given = {name: None if value is False else value for name, value in ours.items()}
        arguments = (spec.python, str(_SERVE), *flag_arguments(given))
        environment = _environment(spec, token, on_cpu=on_cpu)
        return EngineCommand(arguments=arguments, environment=environment, health_path="/health")


def _plain(given: str) -> str:
    name = plain_flag(given)
    return _SYNONYMS.get(name, name)


def _check_flags(flags: Mapping[str, Any], *, ours: Mapping[str, Any], on_cpu: bool) -> None:
    """Raise for a flag that would break the contract, or that another key of the experiment or ``ours`` sets."""
    guarded = {*ours, *_CPU_DEFAULTS, *_ELSEWHERE, *FIXED, *_GPU_ONLY, *_SYNONYMS}
    check_flag_names("sglang", flags, ours=guarded, whole=_WHOLE)
    for given, value in flags.items():
        name = _plain(given)
        if name in _ELSEWHERE:
            raise ConfigError(f"sglang.{given}: is set by {_ELSEWHERE[name]}")
        if name in FIXED and value != FIXED[name]:
            raise ConfigError(f"sglang.{given}: must stay {FIXED[name]!r}, on which answers or weight updates rest")
        if on_cpu and value and name in _GPU_ONLY:
            raise ConfigError(f"sglang.{given}: {_GPU_ONLY[name]}; leave it out on CPUs")


def _context_length(spec: EngineSpec) -> int | None:
    """What to ask for, so that ``rollout.context_length`` tokens can be used, within the model's own limit."""
    if spec.context_length is None:
        return None
    wanted = spec.context_length + _RESERVED
    try:
        config: dict[str, Any] = json.loads((Path(spec.model_path) / "config.json").read_text(encoding="utf-8"))
        limit = {**config, **config.get("text_config", {})}.get("max_position_embeddings")
    except (OSError, ValueError):
        limit = None
    return min(wanted, int(limit)) if limit else wanted


def _environment(spec: EngineSpec, token: str, *, on_cpu: bool) -> dict[str, str]:
    """Variables of the engine's processes; those of the experiment win over ours."""
    threads = {"OMP_NUM_THREADS": str(spec.threads)} if "OMP_NUM_THREADS" not in os.environ else {}
    device = (
        {"SGLANG_USE_CPU_ENGINE": "1", **threads} if on_cpu else {"CUDA_VISIBLE_DEVICES": visible_gpus(spec.devices)}
    )
    return {
        **device,
        "SGLANG_API_KEY": token,
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",  # a server that crashed waits a minute for core dumps
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health would generate a token, and sleep a second
        "HF_HUB_OFFLINE": "1",  # models are folders; nothing is looked for elsewhere
        **spec.environment,
    }
