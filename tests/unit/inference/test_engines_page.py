"""What docs/engines.md says is tested, and what it says is never called."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from areal_like.config.load import load_config
from areal_like.inference.backends import ENGINES, get_engine

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
#: paths that carry pickles or can end a server, and vLLM's digests of empty bytes
UNSAFE = re.compile(r"/(update_weights_from_tensor|update_weights_from_ipc|weight_checker)\b")


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    written = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", file.read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    assert named - written == set()


def test_engines_are_never_asked_what_is_unsafe_or_blind() -> None:
    for file in (ROOT / "areal_like").rglob("*.py"):
        constants = [node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Constant)]
        texts = [constant.value for constant in constants if isinstance(constant.value, str)]
        assert [text for text in texts if UNSAFE.match(text)] == [], file


def test_every_environment_that_a_recipe_names_is_made_by_a_command() -> None:
    """By the page's own, or by the Makefile's."""
    named = {
        str(load_config(path, []).rollout.python).removesuffix("/bin/python")
        for path in (ROOT / "configs").glob("*.yaml")
        if load_config(path, []).rollout.python
    }
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {".venv-vllm", ".venv-vllm-gpu", ".venv-sglang", ".venv-sglang-gpu"} <= named
    for environment in named:
        assert f"-m venv {environment}\n" in PAGE + makefile
        assert re.search(
            rf"^\s*(\$\(call TWICE,)?{re.escape(environment)}/bin/python -m pip install", PAGE + makefile, re.M
        )


def test_our_package_is_installed_where_the_engine_needs_it() -> None:
    for name in ENGINES:
        wanted = f".venv-{name}-gpu/bin/python -m pip install --no-deps -e ." in PAGE
        assert wanted == get_engine(name).needs_us


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_versions_that_the_page_installs_are_those_that_are_tested(name: str) -> None:
    (installed,) = re.findall(rf"pip install {name}==(\S+)", PAGE)
    pinned = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    assert re.search(rf"^{name}(-cpu)?=={re.escape(installed)}$", pinned, re.M)


def test_a_mixture_of_experts_has_other_names_in_training_than_in_its_files() -> None:
    """Why the page says that such models cannot be published; once this fails, they can."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "head_dim": 8, "vocab_size": 32}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**small, **shape))
    assert "model.layers.0.mlp.experts.gate_up_proj" in dict(model.named_parameters())
