"""What docs/engines.md says is tested, and what it says is never called."""

from __future__ import annotations

import ast
import re
from pathlib import Path

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
