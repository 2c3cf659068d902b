"""What the benchmarks of weight updates publish: a Llama of random weights, and the folder a server starts from.

The folder holds a config, a tokenizer and the *header* of a checkpoint: its tensors' bytes are a hole in the file, so
12 GB cost nothing. Servers are started with dummy weights, and get the first real ones by an update.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from step_shapes import SHAPES, Shape
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig

#: ``6b`` has grouped queries, as models of that size do: 256 answers fit beside it on one GPU
SYNC_SHAPES: Mapping[str, Shape] = {
    "tiny": SHAPES["tiny"],
    "135m": Shape(hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3, vocabulary=49152, tied=True),
    "6b": Shape(hidden=4096, intermediate=11008, layers=32, heads=32, kv_heads=8, vocabulary=32000, tied=False),
}
#: positions that its rotary embedding is made for
_POSITIONS = 4096
_SPECIAL = ("<unk>", "<s>", "</s>")
_STORED = {torch.float32: "F32", torch.bfloat16: "BF16"}


def llama_config(shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=_POSITIONS,
        tie_word_embeddings=shape.tied,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
    )


class Policy:
    """A model on one device whose parameters are the weights that are published."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.device = shape, device
        with torch.device(device):
            self.model: Any = AutoModelForCausalLM.from_config(llama_config(shape), dtype=dtype).eval()
        #: by name; a tied head is not among them
        self.weights: dict[str, torch.Tensor] = {name: p.detach() for name, p in self.model.named_parameters()}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.weights.values())

    def renew(self, version: int) -> None:
        """Other weights altogether, the same for the same version. Logits have a deviation near 1."""
        generator = torch.Generator(self.device).manual_seed(version)
        deviation = self.shape.hidden**-0.5
        with torch.no_grad():
            for tensor in self.weights.values():
                tensor.normal_(1.0 if tensor.ndim == 1 else 0.0, deviation, generator=generator)
        self.wait()

    def logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """Of each token of ``answer``, at temperature 1, by transformers' own forward pass."""
        ids = torch.tensor([[*prompt, *answer]], device=self.device)
        with torch.inference_mode():
            logits = self.model(ids).logits[0, len(prompt) - 1 : -1].float()
        found = torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
        return [float(value) for value in found.tolist()]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def write_model_folder(shape: Shape, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """What a server with dummy weights needs to start, and our engine to know the tensors that an update brings."""
    folder.mkdir(parents=True, exist_ok=True)
    config = llama_config(shape)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _write_header(folder / "model.safetensors", dict(model.named_parameters()), _STORED[dtype])
    words = [*_SPECIAL, *(f"t{i}" for i in range(len(_SPECIAL), shape.vocabulary))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=_SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"unk_token": _SPECIAL[0], "bos_token": _SPECIAL[1], "eos_token": _SPECIAL[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))
    return folder


def _write_header(path: Path, tensors: Mapping[str, torch.Tensor], stored: str) -> None:
    """A safetensors file whose tensors are zeros that were never written."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": stored, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        file.truncate(8 + len(text) + end)
