import sys
from pathlib import Path

import pytest

from areal_like.errors import ConfigError
from launcher.environments import installed_version


def install(folder: Path, name: str, version: str) -> None:
    """As an installer leaves it."""
    facts = folder / f"{name}-{version}.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_packages_on_the_path_variable_count_as_servers_have_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "lonely_engine", "4.2")
    assert installed_version(sys.executable, ("lonely-engine",)) == ""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert installed_version(sys.executable, ("no-such-engine", "lonely-engine")) == "4.2"


def test_the_current_folder_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "lonely_engine", "4.2")
    monkeypatch.chdir(tmp_path)
    assert installed_version(sys.executable, ("lonely-engine",)) == ""


def test_a_path_that_is_no_interpreter_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.python"):
        installed_version(str(tmp_path / "python"), ("vllm",))
