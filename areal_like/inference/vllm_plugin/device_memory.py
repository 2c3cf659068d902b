"""What staging needs of a GPU, in one small seam: page-locked host memory, room, and copies beside the model's work.

Methods may be called from any thread; each thread is put on the right device.
"""

from __future__ import annotations

from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """One worker's GPU. Buffers are flat uint8 tensors."""

    def free(self) -> int:
        """Bytes that nobody has allocated on the device."""
        ...

    def register(self, buffer: torch.Tensor) -> str:
        """Lock the pages of a host buffer, so that the device reads them directly. Empty, or what went wrong."""
        ...

    def unregister(self, buffer: torch.Tensor) -> None:
        """Undo :meth:`register`, of a whole buffer that was registered."""
        ...

    def empty(self, nbytes: int) -> torch.Tensor | None:
        """A buffer on the device; None where there is no room."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Host to device, beside what the model computes. From locked pages it returns at once: ``source`` must stay
        as it is until :meth:`settle`.
        """
        ...

    def settle(self) -> None:
        """Wait for every copy."""
        ...

    def give_back(self) -> None:
        """Let others have the memory that buffers of :meth:`empty` had."""
        ...


class CudaMemory:
    """:class:`DeviceMemory` of a CUDA device: copies run on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: some of the device's memory belongs here and is with somebody else for a while: none of it is free
        self.lent = False
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def free(self) -> int:
        return 0 if self.lent else int(torch.cuda.mem_get_info(self._device)[0])

    def register(self, buffer: torch.Tensor) -> str:
        with torch.cuda.device(self._device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
            return "" if int(code) == 0 else str(runtime.cudaGetErrorString(code))

    def unregister(self, buffer: torch.Tensor) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())  # type: ignore[no-untyped-call]

    def empty(self, nbytes: int) -> torch.Tensor | None:
        try:
            with torch.cuda.stream(self._stream):
                return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            return None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=source.is_pinned())

    def settle(self) -> None:
        self._stream.synchronize()

    def give_back(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()
