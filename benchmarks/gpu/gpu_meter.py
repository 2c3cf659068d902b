"""How busy the GPUs are, read in the background."""

from __future__ import annotations

import subprocess
import threading
import time
from importlib import import_module
from statistics import fmean
from typing import Self

#: seconds between two readings of the GPUs
_INTERVAL = 0.1


class GpuMeter:
    """Reads every GPU's busy share (NVML: of the last sample period with a kernel running) in the background.

    A context manager; without GPUs it reads nothing.
    """

    def __init__(self) -> None:
        self.readings: list[tuple[float, tuple[float, ...], tuple[float, ...]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read_for_ever, name="gpu-meter", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join(2.0)

    def busy(self, begin: float, end: float) -> list[float] | None:
        """Mean share per GPU between two moments (monotonic seconds); None without readings."""
        return self._means(1, begin, end, 3)

    def memory_gb(self, begin: float, end: float) -> list[float] | None:
        """Mean memory in use per GPU, GB."""
        return self._means(2, begin, end, 2)

    def _means(self, column: int, begin: float, end: float, digits: int) -> list[float] | None:
        rows: list[tuple[float, ...]] = [r[column] for r in self.readings if begin <= r[0] <= end]  # type: ignore[misc]
        return [round(fmean(values), digits) for values in zip(*rows, strict=True)] if rows else None

    def _read_for_ever(self) -> None:
        try:
            pynvml = import_module("pynvml")
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except Exception:  # no NVML for Python: the tool may still be there
            self._read_tool()
            return
        while not self._over.wait(_INTERVAL):
            busy = tuple(pynvml.nvmlDeviceGetUtilizationRates(h).gpu / 100 for h in handles)
            memory = tuple(pynvml.nvmlDeviceGetMemoryInfo(h).used / 1e9 for h in handles)
            self.readings.append((time.monotonic(), busy, memory))

    def _read_tool(self) -> None:
        command = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
        while not self._over.wait(_INTERVAL):
            try:
                told = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
                rows = [tuple(map(float, line.split(","))) for line in told.splitlines()]
            except (OSError, subprocess.SubprocessError, ValueError):
                return
            busy, memory = zip(*rows, strict=True) if rows else ((), ())
            readings = tuple(b / 100 for b in busy), tuple(m * 2**20 / 1e9 for m in memory)
            self.readings.append((time.monotonic(), *readings))
