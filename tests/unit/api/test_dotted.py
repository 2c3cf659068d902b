"""User code by dotted path: what is found, and what is said when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_like.api.dotted import import_object
from areal_like.errors import ConfigError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current working directory that is not on the path yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere", *__import__("sys").path])
    return tmp_path


def test_modules_in_the_current_directory_are_found(here: Path) -> None:
    (here / "dotted_task.py").write_text("class Outer:\n    class Inner:\n        size = 3\n")
    assert import_object("dotted_task.Outer.Inner.size", "thing") == 3


def test_installed_packages_are_found() -> None:
    assert import_object("areal_like.errors.ConfigError", "thing") is ConfigError


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("plain", "expected a dotted path such as package.module.Name"),
        ("a..b", "expected a dotted path"),
        ("a.b-c", "expected a dotted path"),
        ("no_such_package.thing", "no module named 'no_such_package'; it must be installed or lie under"),
        ("areal_like.errors", "is a module; name something inside it"),
        ("areal_like.errors.ConfgError", "has no 'ConfgError'; did you mean 'ConfigError'?"),
        ("areal_like.no_such_module.Thing", "areal_like has no 'no_such_module'"),
    ],
)
def test_a_wrong_path_is_explained(path: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        import_object(path, "workflow")
    assert str(raised.value).startswith(f"workflow {path!r}")
    assert message in str(raised.value)


def test_a_module_that_breaks_on_import_is_not_called_missing(here: Path) -> None:
    (here / "dotted_broken.py").write_text("1 / 0\n")
    (here / "dotted_needs.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(ConfigError, match="importing dotted_broken raised ZeroDivisionError: division by zero"):
        import_object("dotted_broken.Thing", "workflow")
    with pytest.raises(ConfigError, match="importing dotted_needs failed: No module named 'not_installed_anywhere'"):
        import_object("dotted_needs.Thing", "workflow")
