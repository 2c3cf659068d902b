"""From the experiment to what a server is started with."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_like.config.experiment import ExperimentConfig
from areal_like.errors import ConfigError
from areal_like.inference.backends import ENGINES, get_engine
from launcher.checks import attach_warnings, check_engine
from launcher.child import TOKEN_VARIABLE
from launcher.cli import main
from launcher.devices import Machine
from launcher.engine_facts import described, engine_pythons, find_engine, find_experiments_engine
from launcher.engines import engine_spec, server_part, servers_token
from launcher.processes import INFERENCE, plan_processes

Experiment = Callable[..., ExperimentConfig]


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter whose environment has vLLM 0.28, and us."""
    path = tmp_path / "python"
    path.write_text(
        '#!/bin/sh\nfor word in "$@"; do\n'
        '  case "$word" in vllm) echo 0.28.0; exit;; areal-like) echo 0.1; exit;; esac\ndone\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_sections_of_an_engine_reach_its_server(experiment: Experiment, python: str) -> None:
    config = experiment(
        rollout={"backend": "vllm:d2t2", "python": python, "port": 9000, "environment": {"A": "b"}, "device": "cuda"},
        vllm={"block_size": 64},
        model={"dtype": "bfloat16"},
    )
    planned = [p for p in plan_processes(config, Machine(cores=8, gpus=8)) if p.role == INFERENCE]
    spec = engine_spec(config, planned[1])
    assert (spec.version, spec.tensor, spec.devices, spec.port) == ("0.28.0", 2, ("cuda:2", "cuda:3"), 9001)
    assert (spec.flags, spec.environment, spec.dtype) == ({"block_size": 64}, {"A": "b"}, "bfloat16")
    assert server_part(config, planned[1]).entry == "engine"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"port": 1}, r"vllm\.port: is set by rollout\.port"),
        ({"enable_sleep_mode": True}, "on GPUs only"),
        ({"max_num_seq": 4}, r"vllm\.max_num_seq: .* max_num_seqs"),
    ],
)
def test_flags_that_its_server_would_refuse_are_found_before_anything_starts(
    experiment: Experiment, python: str, flags: dict[str, object], said: str
) -> None:
    config = experiment(rollout={"backend": "vllm:d1", "python": python, "interrupt": "recompute"}, vllm=flags)
    with pytest.raises(ConfigError, match=said):
        check_engine(config, Machine(cores=2, gpus=0))


@pytest.mark.parametrize("servers", [[], ["http://a:1"]])
@pytest.mark.parametrize(("key", "value"), [("gconfig", 0.009), ("eval_gconfig", 1e-7)])
def test_a_temperature_that_the_engine_would_change_is_found_before_anything_starts(
    experiment: Experiment, python: str, servers: list[str], key: str, value: float
) -> None:
    rollout = {"backend": "vllm:d1", "python": python, "interrupt": "recompute", "servers": servers}
    config = experiment(rollout=rollout, **{key: {"max_new_tokens": 4, "temperature": value}})
    with pytest.raises(ConfigError, match=rf"^{key}\.temperature: {value:g} is below 0\.01"):
        check_engine(config, Machine(cores=2, gpus=0))


def test_exact_versions_need_a_scheduler_that_does_not_run_ahead(experiment: Experiment) -> None:
    """Before the environment is looked at: it need not be there."""
    rollout = {"backend": "sglang:d1", "python": "none", "interrupt": "keep"}
    config = experiment(rollout=rollout, sglang={"disable_overlap_schedule": False})
    with pytest.raises(ConfigError, match=r"rollout\.interrupt: 'keep' needs sglang\.disable_overlap_schedule: true"):
        check_engine(config, Machine(cores=2, gpus=0))


@pytest.mark.parametrize(("name", "least"), [("vllm", 0.01), ("sglang", 1e-6)])
def test_the_least_temperatures_are_those_that_requests_are_refused_below(name: str, least: float) -> None:
    assert get_engine(name).least_temperature == least


def test_the_embedded_engine_is_a_role_of_ours(experiment: Experiment) -> None:
    config = experiment()
    (planned,) = [p for p in plan_processes(config, Machine(cores=2, gpus=0)) if p.role == INFERENCE]
    part = server_part(config, planned)
    assert (part.entry, json.loads(part.spec)["name"]) == ("inference", "inference-0")


def test_servers_of_others_are_not_started(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    config = experiment(rollout={"backend": "vllm:d2", "servers": ["http://a:1", "http://b:1"]})
    assert [p.role for p in plan_processes(config, Machine(cores=2, gpus=0)) if p.role == INFERENCE] == []
    monkeypatch.setenv(TOKEN_VARIABLE, "theirs")
    assert servers_token(config, "ours") == "theirs"
    assert servers_token(experiment(), "ours") == "ours"
    assert find_experiments_engine(config).trouble == "asked when the run starts"


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({"servers": ["http://a:1", "http://b:1"]}, "says 1 servers; write d2"),
        ({"servers": ["a:1"]}, "'a:1' is no server's URL"),
        ({"servers": ["http://a:1", "http://a:1"], "backend": "embedded:d2"}, "names a server twice"),
    ],
)
def test_servers_must_be_urls_and_as_many_as_the_backend_says(
    experiment: Experiment, rollout: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        experiment(rollout=rollout)


def test_flags_for_an_engine_that_is_not_used_are_refused(experiment: Experiment) -> None:
    with pytest.raises(ConfigError, match=r"vllm: has flags, and rollout\.backend is 'embedded:d1'"):
        experiment(vllm={"block_size": 16})


@pytest.mark.parametrize("name", ENGINES)
def test_flags_that_servers_of_others_would_never_see_are_refused_by_name(experiment: Experiment, name: str) -> None:
    rollout = {"backend": f"{name}:d1", "servers": ["http://a:1"]}
    with pytest.raises(ConfigError, match=rf"{name}\.block_size, {name}\.seed: flags .*: {name}={{}}\)"):
        experiment(rollout=rollout, **{name: {"block_size": 16, "seed": 1}})
    experiment(rollout=rollout, **{name: {}})


def test_other_keys_that_servers_of_others_never_see_are_named_in_a_warning(experiment: Experiment) -> None:
    keys: dict[str, object] = {"python": "p", "environment": {"A": "1"}, "threads": 2, "port": 0, "max_batch_size": 8}
    assert attach_warnings(experiment(rollout=keys)) == []
    assert attach_warnings(experiment(rollout={"servers": ["http://a:1"]})) == []
    (warning,) = attach_warnings(experiment(rollout=keys | {"servers": ["http://a:1"]}))
    told = warning.partition(":")[0]
    assert told == "rollout.python, rollout.environment, rollout.threads, rollout.max_batch_size"


def test_what_an_old_engine_lacks_is_told_with_the_version_that_has_it(python: str) -> None:
    rows = described(find_engine("vllm", python), gpus=1)
    assert rows["engine"] == f"vLLM 0.28.0 at {python}"
    assert "interrupt=keep needs vLLM >= 0.32" in rows["interrupts"]
    assert "vllm.enable_sleep_mode" in rows["memory release"]


@pytest.mark.parametrize("named", ["", "bin/python"])
def test_an_interpreter_that_is_none_is_told_with_what_to_name(
    experiment: Experiment, tmp_path: Path, named: str
) -> None:
    """A folder, and a file that is not there."""
    config = experiment(rollout={"backend": "vllm:d1", "python": str(tmp_path / named)})
    with pytest.raises(ConfigError, match=r"^rollout\.python: .* cannot be asked.*\.venv-vllm/bin/python"):
        check_engine(config, Machine(cores=2, gpus=0))


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("named", [None, "nowhere/python", "without"])
def test_what_to_name_in_its_place_fits_the_device(
    experiment: Experiment, tmp_path: Path, name: str, named: str | None
) -> None:
    """No interpreter, one that is not there, and one without the engine: GPUs want other environments than CPUs."""
    (tmp_path / "without").symlink_to(sys.executable)

    def told(device: str) -> str:
        python = str(tmp_path / named) if named else None
        with pytest.raises(ConfigError, match=r"^rollout\.python: ") as caught:
            check_engine(
                experiment(rollout={"backend": f"{name}:d1", "python": python, "device": device}),
                Machine(cores=2, gpus=1),
            )
        return str(caught.value)

    cuda, cpu, auto = told("cuda"), told("cpu"), told("auto")
    assert f'.venv-{name}-gpu/bin/python, made as docs/engines.md ("On GPUs")' in cuda and "make engines" not in cuda
    assert f".venv-{name}/bin/python, which `make engines` makes" in cpu and "GPU" not in cpu
    assert "`make engines` makes for CPUs, or" in auto and "On GPUs" in auto


def test_an_environment_that_is_missing_is_no_error() -> None:
    facts = find_engine("vllm", os.path.join("no", "python"))
    assert facts.capabilities is None
    assert "no/python" in described(facts, gpus=0)["state"]


@pytest.mark.parametrize("name", ["embedded", "vllm"])
def test_what_needs_a_gpu_is_not_promised_without_one(python: str, name: str) -> None:
    facts = find_engine(name, python)
    assert described(facts, gpus=0)["transports"] == "collective, disk, shm (ipc needs a GPU)"
    assert described(facts, gpus=1)["transports"] == "collective, disk, ipc, shm"


def test_every_environment_that_is_here_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert engine_pythons("vllm") == [".venv-vllm/bin/python"]  # where make engines would put it
    for folder in (".venv-vllm-0.26", ".venv-vllm", ".venv-sglang-main", "elsewhere", ".venv-vllm-broken"):
        (tmp_path / folder / "bin").mkdir(parents=True)
        if not folder.endswith("broken"):
            (tmp_path / folder / "bin" / "python").symlink_to(sys.executable)
    both = [".venv-vllm/bin/python", ".venv-vllm-0.26/bin/python"]
    assert engine_pythons("vllm") == both
    assert engine_pythons("sglang") == [".venv-sglang-main/bin/python"]
    assert engine_pythons("vllm", "elsewhere/bin/python") == ["elsewhere/bin/python", *both]
    assert engine_pythons("vllm", f"{tmp_path}/.venv-vllm/bin/python") == [f"{tmp_path}/.venv-vllm/bin/python", both[1]]


def test_the_doctor_shows_each_environment_and_which_of_them_would_do(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (".venv-vllm", ".venv-vllm-next"):
        (tmp_path / folder / "bin").mkdir(parents=True)
    (tmp_path / ".venv-vllm" / "bin" / "python").symlink_to(sys.executable)  # an environment without vLLM
    os.symlink(python, tmp_path / ".venv-vllm-next" / "bin" / "python")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "vLLM 0.28.0 at .venv-vllm-next/bin/python" in out
    assert "vllm at .venv-vllm/bin/python" in out
    assert re.search(r"vllm:d1 +│ yes, on .*, with \.venv-vllm-next/bin/python ", out)
    assert re.search(r"sglang:d1 +│ no: rollout.python", out)
