"""What we know of one SGLang server: asked once, then read by its control and its dialect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_like.errors import ServerUnavailable, WeightUpdateError
from areal_like.inference.backends.epoch import ServerEpoch
from areal_like.weights.checkpoint import Expected


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Out of ``/server_info`` and the model's folder, which must be readable here.

    Attributes:
        context_length: longest prompt and answer together that are never cut and never refused.
        vocabulary: ids from here on end the whole server.
        device: ``cpu`` or ``cuda``.
        ranks: processes that hold a part of the model.
        pipeline: stages among them.
        dtype: of its weights, torch's name.
        overlapped: a step is under way while the scheduler handles a pause.
        filtered_tokens: most candidates of a filtered distribution whose log-probs can be told.
        expected: what an update must bring.
        saves_memory: it can release memory.
        backs_weights_up: weights that are released lie in host memory meanwhile.
        deterministic: requests are sampled by their seeds.
    """

    context_length: int
    vocabulary: int
    device: str
    ranks: int
    pipeline: int
    dtype: str
    overlapped: bool
    filtered_tokens: int
    expected: Expected
    saves_memory: bool = False
    backs_weights_up: bool = False
    deterministic: bool = False


@dataclass(slots=True, kw_only=True)
class ServerState:
    """Shared by control and dialect. ``facts`` are there once the server was asked for its health.

    ``closed``: while a drain waits, requests are held back here.
    ``as_loaded``: it serves what it was started with, whose label is none of ours.
    """

    epoch: ServerEpoch = field(default_factory=ServerEpoch)
    facts: ServerFacts | None = None
    closed: bool = False
    as_loaded: bool = False


#: flags on which answers or weight updates rest: servers run with these values (those of others are asked for them)
FIXED: Mapping[str, Any] = {
    "skip_tokenizer_init": False,  # stop strings
    "allow_auto_truncate": False,  # a prompt that is cut silently
    "weight_cache_mode": "off",  # weights shared with others cannot be updated
    "tokenizer_worker_num": 1,  # a pause holds back the requests of one tokenizer process
    "dp_size": 1,  # replicas inside one server cannot be updated; ask for more servers
    "enable_hierarchical_cache": False,  # its prefixes outlive an update
    "speculative_algorithm": None,  # a draft model would keep its old weights
}


def read_facts(name: str, info: Mapping[str, Any]) -> ServerFacts:
    """Facts out of the answer of ``/server_info``.

    Raises:
        ServerUnavailable: it lacks something, runs with flags that break the contract, or its model's folder cannot
            be read.
    """
    for flag, value in FIXED.items():
        if info.get(flag, value) != value:
            raise ServerUnavailable(
                f"{name}: runs with {flag}={info[flag]!r}; it must be {value!r}, on which answers or updates rest"
            )
    try:
        folder = Path(info["model_path"])
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = {**config, **config.get("text_config", {})}
        return ServerFacts(
            context_length=int(info["max_req_input_len"]),
            vocabulary=int(text["vocab_size"]),
            device=str(info["device"]),
            ranks=int(info["tp_size"]) * int(info["pp_size"]),
            pipeline=int(info["pp_size"]),
            dtype=_dtype(str(info["dtype"]), text),
            overlapped=not info["disable_overlap_schedule"],
            saves_memory=bool(info.get("enable_memory_saver")) and str(info["device"]) != "cpu",
            backs_weights_up=bool(info.get("enable_weights_cpu_backup")),
            deterministic=bool(info.get("enable_deterministic_inference")),
            filtered_tokens=int(info.get("sampling_mask_max_tokens") or 0),
            expected=Expected.of(folder, tied=bool(text.get("tie_word_embeddings", False))),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ServerUnavailable(f"{name}: /server_info is not what SGLang >= 0.5.19 answers: {error!r}") from error
    except (OSError, WeightUpdateError) as error:
        raise ServerUnavailable(
            f"{name}: its model's folder must be readable here, so that updates can be checked: {error}"
        ) from error


def _dtype(given: str, config: Mapping[str, Any]) -> str:
    """torch's name; "auto" is that of the checkpoint, with float32 served as float16."""
    names = {"half": "float16", "float": "float32"}
    if given != "auto":
        return names.get(given, given)
    own = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return "float16" if own == "float32" else own
