"""What a model's folder says of its tensors, read from the headers of its safetensors files."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open

from areal_like.errors import WeightUpdateError
from areal_like.inference.vllm_plugin.receiver import Expected

#: names under which language models keep their head and the embedding that it may be tied to
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def expected_tensors(folder: Path, *, tied: bool) -> Expected:
    """Every tensor of the checkpoint in ``folder``; a tied head may come or not.

    Raises:
        WeightUpdateError: the folder has no safetensors files.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if not shapes:
        raise WeightUpdateError(f"{folder}: no safetensors files; weights can only be updated on a model that has them")
    optional: dict[str, tuple[int, ...]] = {}
    if tied and EMBEDDING in shapes:
        optional[HEAD] = shapes.pop(HEAD, shapes[EMBEDDING])
    return Expected(shapes=shapes, optional=optional)
