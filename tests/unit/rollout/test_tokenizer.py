"""The light tokenizer gives the ids and the text that transformers gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from areal_like.errors import ConfigError
from areal_like.rollout.tokenizer import load_tokenizer

TEXTS = ("Hello, wörld! 12+3=", "  two  spaces , and <eos> inside", "", "<bos>again", "日本 🙂 don't")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + mood | default('') }}{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "  Hello  "},
    {"role": "user", "content": "And?"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer with a post-processor, special tokens and a chat template, as models ship them."""
    path = tmp_path_factory.mktemp("model")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 20, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    backend.enable_truncation(4)  # a leftover of training: must not cut prompts
    backend.enable_padding()
    backend.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
        "pad_token": "<pad>",
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_ids_and_text_are_those_of_transformers(folder: Path, reference: Any, text: str, special: bool) -> None:
    light = load_tokenizer(folder)
    ids = light.encode(text, add_special_tokens=special)
    assert ids == reference.encode(text, add_special_tokens=special)
    for skip in (True, False):
        assert light.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("variables", [{}, {"mood": "calm"}, {"tools": [{"type": "function", "name": "größe<1>"}]}])
@pytest.mark.parametrize("prompt", [True, False])
def test_chats_are_those_of_transformers(folder: Path, reference: Any, variables: dict[str, Any], prompt: bool) -> None:
    ids = load_tokenizer(folder).apply_chat_template(CHAT, add_generation_prompt=prompt, **variables)
    expected = reference.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=False, **variables)
    assert ids == expected


def test_special_ids_are_those_of_transformers(folder: Path, reference: Any) -> None:
    light = load_tokenizer(folder)
    assert (light.eos_token_id, light.pad_token_id, light.bos_token_id) == (4, 0, 1)
    assert (reference.eos_token_id, reference.pad_token_id, reference.bos_token_id) == (4, 0, 1)
    assert light.vocab_size == len(reference)


def test_a_template_file_wins_and_the_config_may_add_tokens(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"add_bos_token": False, "add_eos_token": True, "added_tokens_decoder": {"400": {"content": "<new>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    light, reference = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for text in ("Hello <new> world", "12"):
        assert light.encode(text) == reference.encode(text)
    assert light.apply_chat_template(CHAT) == reference.apply_chat_template(CHAT, return_dict=False)


def test_a_folder_that_the_tiny_models_write_works_both_ways(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    words = ["<pad>", "<bos>", "<eos>", "higher", "lower", "correct", *"01234"]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(words[:3])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(tmp_path)
    light, reference = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for text in ("<bos>", "higher", "3 lower 1 correct", "<bos> 4 higher"):
        assert light.encode(text) == reference.encode(text)
        assert light.decode(light.encode(text)) == reference.decode(reference.encode(text))


def test_neither_torch_nor_transformers_is_imported(folder: Path) -> None:
    code = (
        "import sys; from areal_like.rollout.tokenizer import load_tokenizer; "
        f"load_tokenizer({str(folder)!r}).apply_chat_template([{{'role': 'user', 'content': 'Hi'}}]); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"no tokenizer.json \(it holds nothing\)"),
        ({"tokenizer.model": "x"}, r"no tokenizer.json \(it holds tokenizer.model\)"),
        ({"tokenizer.json": "{"}, "cannot be read as a tokenizer"),
        ({"tokenizer.json": None, "tokenizer_config.json": "{"}, "tokenizer_config.json: not JSON"),
        ({"tokenizer.json": None, "tokenizer_config.json": "[]"}, "expected an object, not list"),
        (
            {"tokenizer.json": None, "tokenizer_config.json": '{"eos_token": "</s>"}'},
            "eos_token is '</s>', which tokenizer.json has no id for",
        ),
        ({"tokenizer.json": None, "chat_template.jinja": "{% if %}"}, "chat template does not parse"),
    ],
)
def test_a_bad_folder_is_explained(folder: Path, tmp_path: Path, files: dict[str, str | None], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content if content is not None else (folder / name).read_text())
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(tmp_path)


def test_a_missing_folder_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_chat_without_template_or_one_that_it_refuses(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match="has no chat template"):
        load_tokenizer(tmp_path).apply_chat_template(CHAT)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="refuses these messages: roles must alternate"):
        load_tokenizer(tmp_path).apply_chat_template(CHAT)


def test_templates_run_in_a_sandbox(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(ValueError, match="refuses"):
        load_tokenizer(tmp_path).apply_chat_template(CHAT)
