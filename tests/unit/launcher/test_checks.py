"""What is found wrong before a process starts, one message each."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from areal_like.config.experiment import ExperimentConfig
from areal_like.errors import ConfigError
from launcher.checks import check_experiment, check_ports
from launcher.devices import Machine
from launcher.transport_checks import check_collective

Experiment = Callable[..., ExperimentConfig]
LAPTOP = Machine(cores=2, gpus=0)


def fault(config: ExperimentConfig, machine: Machine = LAPTOP) -> str:
    with pytest.raises(ConfigError) as caught:
        check_experiment(config, machine=machine)
    return str(caught.value)


def test_a_sound_experiment_passes_without_warnings(experiment: Experiment) -> None:
    report = check_experiment(experiment(), machine=LAPTOP)
    assert report.warnings == ()
    assert (report.train_rows, report.valid_rows) == (8, 0)
    assert report.model.context_length == 64


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"path": "nowhere/model"}}, "model.path: nowhere/model does not exist"),
        ({"rollout": {"backend": "vllm:d1"}}, "rollout.python: vllm runs in an environment of its own; name its"),
        (
            {"rollout": {"backend": "vllm:d1", "python": "nowhere/python"}},
            "rollout.python: nowhere/python cannot be asked",
        ),
        (
            {"rollout": {"backend": "vllm:d1", "python": sys.executable}},
            "has no vllm; install it there, or name .venv-vllm/bin/python",
        ),
        ({"rollout": {"backend": "embedded:d2t2"}}, "an embedded server computes on one device; use embedded:d2"),
        ({"ref": {"path": "nowhere/ref"}}, "ref.path: nowhere/ref does not exist"),
        ({"actor": {"advantage": "gae"}, "critic": {"path": "nowhere/critic"}}, "critic.path: nowhere/critic does"),
        ({"rollout": {"device": "cuda"}}, "rollout.device: 'cuda' was asked for, and torch can use no GPU here"),
        ({"actor": {"device": "cuda"}}, "actor.device: 'cuda' was asked for"),
        ({"workflow": "words_for_checks.Wrods"}, "has no 'Wrods'; did you mean 'Words'?"),
        ({"workflow": "no_such_module.Words"}, "no_such_module"),
        ({"workflow": "words_for_checks.accept"}, "name a class with `async def arun_episode`"),
        ({"workflow_args": {"turn": 3}}, "workflow_args.turn"),
        ({"workflow_args": {"turns": 0}}, "its __init__ raised ValueError: at least one turn, not 0"),
        ({"workflow_args": {"turns": "many"}}, "its __init__ raised TypeError"),
        ({"runs_dir": "/proc/nope"}, "runs_dir: /proc: nothing can be made in it"),
        ({"reward_fn": "words_for_checks.NOTHING"}, "reward_fn 'words_for_checks.NOTHING' is int"),
        ({"rollout": {"accept_fn": "words_for_checks.none"}}, "rollout.accept_fn 'words_for_checks.none'"),
        ({"train_dataset": {"path": "nowhere.jsonl"}}, "train_dataset.path: dataset nowhere.jsonl: cannot be read"),
        ({"valid_dataset": {"path": "nowhere.jsonl"}}, "valid_dataset.path: dataset nowhere.jsonl: cannot be read"),
        ({"rollout": {"context_length": 65}}, "rollout.context_length: 65 exceeds the model's own limit of 64"),
        ({"gconfig": {"min_new_tokens": 64, "max_new_tokens": 64}}, "64 leaves no room for a prompt in 64 tokens"),
        ({"rollout": {"port": 65535, "backend": "embedded:d2"}}, "2 servers from port 65535 end beyond 65535"),
        ({"rollout": {"host": "no.such.host.invalid", "port": 9}}, "rollout.host: 'no.such.host.invalid'"),
    ],
)
def test_each_fault_is_named(experiment: Experiment, changes: dict[str, Any], said: str) -> None:
    assert said in fault(experiment(**changes))


def test_a_reference_of_another_vocabulary_is_refused(experiment: Experiment, tmp_path: Path) -> None:
    folders = [shutil.copytree(experiment().model.path, tmp_path / name) for name in ("policy", "ref")]
    policy, ref = ({"path": str(folder)} for folder in folders)
    assert check_experiment(experiment(model=policy, ref=ref), machine=LAPTOP).warnings == ()
    for folder, size in zip(folders, (32, 48), strict=True):
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | {"vocab_size": size}))
    said = fault(experiment(model=policy, ref=ref))
    assert "knows 48 tokens and model.path knows 32" in said and "not comparable" in said


def test_a_bad_line_of_a_dataset_is_named_by_its_number(experiment: Experiment, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a"}\n\n{"prompt": \n')
    assert f"train_dataset.path: {broken}, line 3: not JSON" in fault(experiment(train_dataset={"path": str(broken)}))


def test_every_fault_is_in_the_one_message(experiment: Experiment) -> None:
    text = fault(experiment(model={"path": "nowhere"}, workflow="a.b", rollout={"backend": "vllm:d1"}))
    first, *listed = text.splitlines()
    assert first == "3 faults"
    assert [line.split(":")[0].split(" '")[0].strip() for line in listed] == [
        "rollout.python",
        "model.path",
        "workflow",
    ]


def test_nccl_needs_a_gpu_for_each_end(experiment: Experiment) -> None:
    def asked(gpus: int, **weights: Any) -> None:
        config = experiment(weights={"transport": "collective", **weights})
        check_collective(config, Machine(cores=8, gpus=gpus))

    asked(gpus=0)
    asked(gpus=2)
    asked(gpus=1, group="gloo")
    with pytest.raises(ConfigError, match=r"needs a GPU for the trainer \(cpu\).*use weights.group=gloo"):
        asked(gpus=0, group="nccl")
    with pytest.raises(ConfigError, match=r"trainer \(cuda:0\) and others for the servers \(cuda:0\)"):
        asked(gpus=1)


def test_a_port_in_use_is_named_and_a_free_one_passes(experiment: Experiment) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"rollout.port: 127.0.0.1:{port} is in use by another process" in fault(
            experiment(rollout={"port": port})
        )
    check_ports("127.0.0.1", port, 1)


def test_the_second_servers_port_is_looked_at_too() -> None:
    with taken_behind_a_free_one() as port, pytest.raises(ConfigError, match=f"127.0.0.1:{port} is in use"):
        check_ports("127.0.0.1", port - 1, 2)


@contextmanager
def taken_behind_a_free_one() -> Iterator[int]:
    """A port in use, and nobody uses the one before it."""
    with ExitStack() as taken:
        while True:
            server = taken.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = int(server.getsockname()[1])
            with suppress(OSError), socket.create_server(("127.0.0.1", port - 1)):
                break
        yield port


@pytest.mark.parametrize(
    ("changes", "machine", "said"),
    [
        ({"rollout": {"threads": 2}, "actor": {"threads": 2}}, LAPTOP, "with 4 threads on 2 cores"),
        ({"actor": {"backend": "fsdp:d8"}}, LAPTOP, "9 servers and ranks are to compute on 2 cores"),
        ({"gconfig": {"max_new_tokens": 64}}, LAPTOP, "answers end where the context does"),
        ({"gconfig": {"max_new_tokens": 62}}, LAPTOP, "row 1 has at least 3 tokens: with max_new_tokens=62 it exceeds"),
        ({"rollout": {"context_length": 3}, "gconfig": {"max_new_tokens": 1}}, LAPTOP, "a request with it fails"),
        ({"train_dataset": {"batch_size": 9}}, LAPTOP, "8 rows for a batch of 9 groups"),
        ({"rollout": {"host": "0.0.0.0"}}, LAPTOP, "can be reached from other machines"),
        ({"rollout": {"max_concurrent_rollouts": 4, "max_head_offpolicyness": 0}}, LAPTOP, "in several rounds"),
        ({"gconfig": {"n_samples": 1, "max_new_tokens": 8}}, LAPTOP, "every advantage is 0"),
        ({"actor": {"backend": "fsdp:d2"}}, Machine(cores=8, gpus=2), "would use 3 GPUs and 2 are here"),
    ],
)
def test_what_works_hardly_as_meant_is_a_warning(
    experiment: Experiment, changes: dict[str, Any], machine: Machine, said: str
) -> None:
    warnings = check_experiment(experiment(**changes), machine=machine).warnings
    assert any(said in warning for warning in warnings), warnings


def test_the_longest_prompt_is_found_whether_text_or_ids(experiment: Experiment, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n{"input_ids": [0, 0, 0, 0, 0]}\n{"other": 1}\n')
    config = experiment(train_dataset={"path": str(rows), "batch_size": 1}, rollout={"context_length": 10})
    (warning,) = check_experiment(config, machine=LAPTOP).warnings
    assert "row 2 has at least 5 tokens: with max_new_tokens=8 it exceeds the context of 10" in warning


def test_a_folder_with_an_earlier_run_needs_force(experiment: Experiment, tmp_path: Path) -> None:
    earlier = tmp_path / "runs" / "words" / "cpu"
    earlier.mkdir(parents=True)
    (earlier / "summary.json").touch()
    assert "holds an earlier run; choose another trial_name=..., or pass --force" in fault(experiment())
    check_experiment(experiment(), machine=LAPTOP, force=True)
    check_experiment(experiment(), machine=LAPTOP, run_directory=False)


@pytest.mark.parametrize("row", ['{"prompt": "a"}', '{"secret": 3}'])
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", "{bad", "tokenizer.json: cannot be read as a tokenizer"),
        ("tokenizer.json", "{}", "tokenizer.json: cannot be read as a tokenizer"),
        ("tokenizer_config.json", '{"eos_token": {}}', "a file beside tokenizer.json is malformed: KeyError"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}', "is malformed: ValueError"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: not JSON"),
        ("chat_template.jinja", "{% if", "template"),
    ],
)
def test_a_broken_tokenizer_is_found_whatever_the_rows_hold(
    experiment: Experiment, tmp_path: Path, row: str, name: str, content: str, said: str
) -> None:
    config = experiment()
    (tmp_path / "train.jsonl").write_text(f"{row}\n")
    (Path(config.model.path) / name).write_text(content)
    assert said in fault(config)


def test_a_model_with_another_kind_of_tokenizer_is_told_what_to_save(experiment: Experiment) -> None:
    folder = Path(experiment().model.path)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    assert "no tokenizer.json" in fault(experiment())


def test_the_workflow_of_the_evaluation_is_built_with_its_own_sampling(experiment: Experiment, tmp_path: Path) -> None:
    (tmp_path / "short_for_checks.py").write_text(
        "from areal_like.api import RolloutWorkflow\n\n\n"
        "class Short(RolloutWorkflow):\n"
        "    def __init__(self, gconfig, reward_fn):\n"
        "        if gconfig.max_new_tokens > 8:\n"
        "            raise ValueError('too long')\n\n"
        "    async def arun_episode(self, engine, data):\n"
        "        return None\n"
    )
    changes = {"workflow": "short_for_checks.Short", "reward_fn": "words_for_checks.accept"}
    longer = {"eval_gconfig": {"max_new_tokens": 9}}
    check_experiment(experiment(**changes, **longer), machine=LAPTOP)
    valid = {"valid_dataset": {"path": str(tmp_path / "train.jsonl")}}
    check_experiment(experiment(**changes, **valid), machine=LAPTOP)
    assert "__init__ raised ValueError: too long" in fault(experiment(**changes, **longer, **valid))
