"""What this machine can compute with, found without importing torch."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path

#: two places where a GPU shows; a container may have either
_DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
_DEVICE_NODES = "nvidia[0-9]*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """CPU cores this process may use, and CUDA devices that torch will see."""

    cores: int
    gpus: int


def this_machine() -> Machine:
    return Machine(cores=_usable_cores(), gpus=_visible_gpus())


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _visible_gpus() -> int:
    """GPUs that the driver shows and ``CUDA_VISIBLE_DEVICES`` allows; none where torch was built for the CPU."""
    try:
        if importlib.metadata.version("torch").endswith("+cpu"):
            return 0
    except importlib.metadata.PackageNotFoundError:
        return 0
    driven = len(list(_DRIVER_FOLDER.iterdir())) if _DRIVER_FOLDER.is_dir() else 0
    present = driven or len(list(Path("/dev").glob(_DEVICE_NODES)))
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return present
    return min(present, len([name for name in allowed.split(",") if name.strip() not in ("", "-1")]))
