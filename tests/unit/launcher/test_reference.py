"""The page of configuration keys says what the models say."""

from __future__ import annotations

from pathlib import Path

from launcher.reference import reference

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_page_is_what_the_models_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run: python -m launcher.reference > docs/configuration.md"


def test_defaults_sections_and_bars_are_shown() -> None:
    page = reference()
    assert "| `rollout.max_head_offpolicyness` | integer | `2` | η" in page
    assert "| `experiment_name` | text | required |" in page
    assert "## `actor.optimizer`" in page
    assert "disk \\| shm" in page
