"""vLLM's own weight-transfer engines, as receivers inside ours: their packed protocols over our groups and handles.

The lifecycle (layer-wise reload) stays ours; the "model" that they load into is a :class:`Recorder`. Their settings lie
in ``update_info`` up to 0.28 and in attributes of the engine from 0.29 on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields
from typing import Any

import torch

from areal_like.api.weights import Manifest, TensorEntry
from areal_like.inference.vllm_plugin.delivery import Source
from areal_like.inference.vllm_plugin.recorder import Recorder
from areal_like.weights.chunks import plan_chunks
from areal_like.weights.digest import parse_dtype
from areal_like.weights.transports.ipc import SharedBuckets
from areal_like.weights.transports.meeting import Meeting

#: buffers that take turns in vLLM's packed consumer
_BUFFERS = 2


def feed(source: Source, recorder: Recorder, manifest: Manifest, ours: Any) -> None:
    """Every tensor of ``manifest`` from ``source`` into ``recorder``, in order. The device may still be at work.

    ``ours``: our engine, for what vLLM's engines are constructed with.
    """
    if isinstance(source, SharedBuckets):
        _feed_shared(source, recorder, manifest, ours)
        return
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    bucket_bytes = Meeting.parse(manifest.location).bucket_bytes
    native = NCCLWeightTransferEngine(ours.config, ours.vllm_config, ours.device, recorder)
    native.model_update_group = source
    info = _settled(
        native,
        _described(manifest.tensors),
        {"packed": True, "packed_buffer_size_bytes": bucket_bytes, "packed_num_buffers": _BUFFERS},
    )
    native.receive_weights(info)


def load_engines() -> None:
    """Import now what is used while the server is paused: it takes seconds."""
    import vllm.distributed.weight_transfer.nccl_engine

    with suppress(ImportError):
        import vllm.distributed.weight_transfer.ipc_engine  # noqa: F401


def settle() -> None:
    """Wait for the device, and give back what vLLM's consumer leaves behind: up to 0.28 it makes streams of its own for
    each update, whose buffers no other stream can use.
    """
    from vllm.distributed.weight_transfer import packed_tensor

    torch.cuda.synchronize()
    if not hasattr(packed_tensor, "_get_streams"):
        torch.cuda.empty_cache()


def unpinned() -> AbstractContextManager[None]:
    """Around the making of a group with processes that are not vLLM's, whose NCCL settings vLLM changes for itself."""
    try:
        from vllm.utils.nccl import unpinned_nccl_env
    except ImportError:  # before 0.32 it changes nothing
        return nullcontext()
    found: AbstractContextManager[None] = unpinned_nccl_env()
    return found


def _feed_shared(shared: SharedBuckets, recorder: Recorder, manifest: Manifest, ours: Any) -> None:
    consume = _shared_consumer(recorder, ours)
    chunks = plan_chunks([entry.nbytes for entry in manifest.tensors], shared.bucket_bytes)
    for chunk, handle in zip(chunks, shared.buckets, strict=True):
        entries = manifest.tensors[chunk.first : chunk.last]
        if handle.nbytes:
            consume(entries, {shared.gpu: handle.arguments()})
        else:  # tensors without elements
            recorder.load_weights(
                (entry.name, torch.empty(entry.shape, dtype=parse_dtype(entry.dtype), device=ours.device))
                for entry in entries
            )


_Consumer = Callable[[Iterable[TensorEntry], Mapping[str, tuple[Any, ...]]], None]


def _shared_consumer(recorder: Recorder, ours: Any) -> _Consumer:
    """vLLM's ``ipc`` engine; its consumer alone where the engine cannot be imported (0.26 wants ray for it)."""
    try:
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
    except ImportError:
        from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_consumer

        def consume(entries: Iterable[TensorEntry], handles: Mapping[str, tuple[Any, ...]]) -> None:
            told = _described(entries)
            sizes = [entry.nbytes for entry in entries]
            index = ours.device.index or 0
            weights = packed_ipc_consumer(ipc_handle=handles, tensor_sizes=sizes, device_index=index, **told)
            recorder.load_weights(weights)

        return consume

    native = IPCWeightTransferEngine(ours.config, ours.vllm_config, ours.device, recorder)

    def receive(entries: Iterable[TensorEntry], handles: Mapping[str, tuple[Any, ...]]) -> None:
        told = {**_described(entries), "ipc_handles": handles, "tensor_sizes": [entry.nbytes for entry in entries]}
        native.receive_weights(_settled(native, told, {"packed": True}))

    return receive


def _described(entries: Iterable[TensorEntry]) -> dict[str, Any]:
    listed = list(entries)
    return {
        "names": [entry.name for entry in listed],
        "dtype_names": [entry.dtype for entry in listed],
        "shapes": [list(entry.shape) for entry in listed],
    }


def _settled(native: Any, told: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """The update info, with ``settings`` where this version of vLLM keeps them."""
    known = {field.name for field in fields(native.update_info_cls)}
    for name, value in settings.items():
        if name not in known:
            setattr(native, name, value)
    return native.update_info_cls(**told, **{name: value for name, value in settings.items() if name in known})
