"""An experiment file as people write it, and what they are told when it is wrong."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from areal_like.api.weights import InterruptMode
from areal_like.config.load import config_from_mapping, dump_resolved, load_config
from areal_like.config.yaml_text import parse_scalar, parse_yaml
from areal_like.errors import ConfigError

SMALL = """\
experiment_name: sums
trial_name: cpu
model: {path: models/tiny}
train_dataset:
  path: data/train.jsonl
  batch_size: 32
workflow: workflows.single_turn.SingleTurnWorkflow
gconfig: {n_samples: 8, max_new_tokens: 8}
actor:
  optimizer: {lr: 1e-3}
  ppo_n_minibatches: 4
total_train_steps: 100
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "exp.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def message(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), overrides)
    return str(caught.value)


def test_a_small_file_gets_defaults_and_typed_numbers(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, SMALL))
    assert config.actor.optimizer.lr == 0.001
    assert config.rollout.max_head_offpolicyness == 2
    assert config.rollout.interrupt is InterruptMode.KEEP
    assert config.evaluation_gconfig is config.gconfig


def test_what_is_dumped_loads_as_the_same_experiment(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, SMALL), ["gconfig.stop=['\\n', x]", "workflow_args.turns=3", "reward_fn=a.b"])
    again = tmp_path / "resolved.yaml"
    again.write_text(dump_resolved(config), encoding="utf-8")
    assert load_config(again) == config
    assert list(config.gconfig.stop) == ["\\n", "x"]  # single quotes keep the backslash, as YAML says


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("actor.optimizer.lr=1e-4", 1e-4),
        ("actor.optimizer.lr=2.5E-5", 2.5e-5),
        ("actor.optimizer.lr=1", 1.0),
        ("actor.behave_cap=null", None),
        ("actor.optimizer.weight_decay=.1", 0.1),
        ("trial_name=001", "001"),
        ("trial_name=1e5", "1e5"),
        ("trial_name='x y'", None),
        ("model.path=/m=odel/x", "/m=odel/x"),
        ("reward_fn=null", None),
        ("train_dataset.shuffle=false", False),
        ("rollout.interrupt=drain", InterruptMode.DRAIN),
        ("gconfig.stop_token_ids=[1, 2]", (1, 2)),
        ("workflow_args={turns: 3, discount: 1e-1}", {"turns": 3, "discount": 0.1}),
        ("workflow_args.limits.turns=3", {"limits": {"turns": 3}}),
        ("valid_dataset={path: x.jsonl}", None),
    ],
)
def test_overrides_are_typed_as_the_key_wants(tmp_path: Path, override: str, value: object) -> None:
    if override == "trial_name='x y'":
        assert "trial_name: must match" in message(tmp_path, SMALL, override)
        return
    config = load_config(write(tmp_path, SMALL), [override])
    if override.startswith("valid_dataset"):
        assert config.valid_dataset is not None
        assert config.valid_dataset.path == "x.jsonl"
        return
    found: object = config
    path = "workflow_args" if override.startswith("workflow_args") else override.split("=")[0]
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


def test_the_last_override_of_a_key_wins(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, SMALL), ["seed=2", "seed=3"]).seed == 3


def test_overrides_make_missing_sections_and_leave_the_file_alone(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL)
    assert load_config(path, ["rollout.port=8000", "eval_gconfig.top_p=0.9"]).rollout.port == 8000
    assert path.read_text() == SMALL


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed", "override 'seed': expected key=value"),
        ("=3", "is no dotted key"),
        ("actor..lr=3", "is no dotted key"),
        ("actor.optimizer.lrr=1", "actor.optimizer.lrr: unknown key; did you mean actor.optimizer.lr?"),
        ("actor.path=x", "actor.path: unknown key; here it is model.path"),
        ("seed=[1", "override 'seed=[1': expected ',' or ']'"),
        ("workflow_args={turns:", "where a value has spaces, quote the whole: 'workflow_args={turns: ...'"),
        ("gconfig.stop=[a,", "where a value has spaces, quote the whole: 'gconfig.stop=[a, ...'"),
        ("seed.x=1", "seed.x: unknown key; seed has no keys of its own"),
        ("train_dataset.batch_size=abc", "train_dataset.batch_size: must be a whole number; got 'abc'"),
        ("train_dataset.batch_size=true", "train_dataset.batch_size: must be a whole number; got True"),
        ("total_train_steps=1.5", "total_train_steps: must be a whole number; got 1.5"),
        ("actor.optimizer.lr=.inf", "actor.optimizer.lr: must be a finite number; got inf"),
        ("gconfig.temperature=.nan", "gconfig.temperature: must be a finite number; got nan"),
        ("gconfig.stop=['a', '']", "stop must not hold an empty string"),
        ("gconfig.stop_token_ids=[-1]", "gconfig.stop_token_ids.0: must be at least 0; got -1"),
        ("actor.lora.target_modules=[]", "actor.lora.target_modules: must have at least 1 entries; got []"),
        ("actor.optimizer.lr=.nan", "actor.optimizer.lr: must be a finite number; got nan"),
        ("rollout.max_head_offpolicyness=-1", "rollout.max_head_offpolicyness: must be at least 0; got -1"),
        ("rollout.backend=vlm:d1", "rollout.backend: unknown backend 'vlm'; known: embedded, vllm, sglang"),
        ("rollout.backend=embedded:x1", "rollout.backend: size x1 of 'embedded:x1' is unknown"),
        ("actor.backend=fsdp:d2t2", "actor.backend: 'fsdp:d2t2': only data parallelism (d) is supported"),
        ("rollout.interrupt=cut", "rollout.interrupt: must be one of 'keep', 'recompute' or 'drain'; got 'cut'"),
        ("recover.mode=auto", "recover.mode: must be 'disabled'; got 'auto'"),
        ("trial_name=..", "trial_name: must match"),
        ("trial_name=a/b", "trial_name: must match"),
        ("evaluator=3", "evaluator: must be a section (a mapping of keys to values); got 3"),
        ("gconfig.min_new_tokens=99", "min_new_tokens (99) must not exceed max_new_tokens (8)"),
        ("gconfig.top_p=0.9", "gconfig.top_p: training needs the log-probs of the distribution sampled from"),
        (
            "train_dataset.batch_size=30",
            "train_dataset.batch_size (30) must be a multiple of actor.ppo_n_minibatches (4)",
        ),
    ],
)
def test_a_bad_override_is_one_message(tmp_path: Path, override: str, said: str) -> None:
    assert said in message(tmp_path, SMALL, override)


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("model.dtype", "'float32' or 'bfloat16'"),
        ("actor.adv_norm.mean_level", "'group', 'batch' or null"),
        (
            "actor.advantage",
            "'grpo', 'dr_grpo', 'rloo', 'reinforce_plus_plus', 'reinforce_plus_plus_baseline', 'lite_ppo', "
            "'reinforce_baseline', 'gae' or null",
        ),
    ],
)
def test_a_name_that_is_none_is_one_fault_with_all_that_are(tmp_path: Path, key: str, options: str) -> None:
    assert message(tmp_path, SMALL, f"{key}=x") == f"{tmp_path / 'exp.yaml'}: {key}: must be one of {options}; got 'x'"


def test_every_fault_is_listed_with_key_line_rule_and_value(tmp_path: Path) -> None:
    text = SMALL.replace("trial_name: cpu", "trial_name: 12").replace("batch_size: 32", "batch_size: 0\n  tpye: x")
    text = text.replace("total_train_steps: 100\n", "") + "lr: 3\nrollout: {max_head_offpolicyness: two}\n"
    assert message(tmp_path, text).splitlines() == [
        f"{tmp_path / 'exp.yaml'}: 6 faults",
        "  trial_name (line 2): must be text (quote it); got 12",
        "  total_train_steps: is required",
        "  train_dataset.batch_size (line 6): must be at least 1; got 0",
        "  train_dataset.tpye (line 7): unknown key; did you mean train_dataset.path?",
        "  rollout.max_head_offpolicyness (line 14): must be a whole number; got 'two'",
        "  lr (line 13): unknown key; did you mean actor.optimizer.lr?",
    ]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("actor: {optmizer: {lr: 1}}", "actor.optmizer (line 13): unknown key; did you mean actor.optimizer?"),
        ("rolout: {port: 1}", "rolout (line 13): unknown key; did you mean rollout?"),
        ("actor: {path: x}", "actor.path (line 13): unknown key; here it is model.path"),
        ("actor: {kl_ctl: 0.1}", "actor.kl_ctl (line 13): unknown key; here it is ref.kl_coef"),
        ("max_head_offpolicyness: 2", "unknown key; did you mean rollout.max_head_offpolicyness?"),
        ("actor: {optimizer: {warmup_steps_proportion: 0.1}}", "here it is actor.optimizer.warmup_steps"),
        ("total_train_epochs: 3", "here it is total_train_steps (steps = epochs x prompts / train_dataset.batch_size)"),
        ("zzzz: 1", "zzzz (line 13): unknown key; the top level has experiment_name, trial_name"),
        ("recover: {freq_steps: 20}", "recover.freq_steps (line 13): unknown key: recovery is not built yet"),
    ],
)
def test_an_unknown_key_names_the_one_that_was_meant(tmp_path: Path, wrong: str, right: str) -> None:
    kept = "".join(line for line in SMALL.splitlines(True) if not line.startswith(("actor", "  optimizer", "  ppo")))
    text = kept + "# moved\n" * 3 + wrong + "\n"
    assert right in message(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("- a\n- b\n", "exp.yaml:1: expected 'key: value' lines at the top level, got a list"),
        ("seed: 1\n\tmodel: x\n", "exp.yaml:2:1: YAML syntax error: found character '\\t'"),
        ("seed: 1\nmodel: {path: x\nworkflow: y\n", "exp.yaml:3:9: YAML syntax error"),
        ("seed: 1\nmodel: {path: a}\nmodel: {path: b}\n", "exp.yaml:3: model is said twice (first on line 2)"),
        ("actor: {eps_clip: 0.1,\n eps_clip: 0.2}\n", "exp.yaml:2: actor.eps_clip is said twice (first on line 1)"),
        ("1: x\n", "1: keys must be text, got 1"),
        ("model: !!python/object:os.system {}\n", "YAML syntax error: could not determine a constructor"),
    ],
)
def test_text_that_is_no_experiment(tmp_path: Path, text: str, said: str) -> None:
    assert said in message(tmp_path, text)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such experiment file"):
        load_config(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"seed: \xe9\n")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 6\)"):
        load_config(tmp_path / "latin.yaml")


def test_words_stay_words_and_dates_stay_text(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, SMALL + "workflow_args: {a: no, b: on, c: 2026-11-29, d: 1e3, e: 0x10}\n"))
    assert config.workflow_args == {"a": "no", "b": "on", "c": "2026-11-29", "d": 1000.0, "e": 16}


def test_anchors_and_merges_work(tmp_path: Path) -> None:
    text = SMALL.replace("gconfig: {", "gconfig: &g {") + "eval_gconfig: {<<: *g, n_samples: 1, top_p: 0.9}\n"
    config = load_config(write(tmp_path, text))
    assert config.eval_gconfig is not None
    assert (config.eval_gconfig.n_samples, config.eval_gconfig.max_new_tokens) == (1, 8)


def test_a_mapping_is_checked_like_a_file() -> None:
    with pytest.raises(ConfigError, match="here: 6 faults"):
        config_from_mapping({"seed": 1}, source="here")


def test_loading_imports_no_torch() -> None:
    code = "import sys, areal_like.config.load; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{last}'] * 9)}]\n" for last, name in pairwise("abcdefghi")
)
MERGE_BOMB = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{last}'] * 9)}]}}\n" for last, name in pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "f: its aliases (*name) come to more than 100000 values; write fewer"),
        (MERGE_BOMB, "f: its aliases (*name) come to more than 100000 values"),
        ("a: 1\nb: &b\n  c: *b\n", "f:2: a value holds itself"),
        ("a: 1\nb: &b [*b]\n", "f:2: a value holds itself"),
        ("a: 1\nb: x\x01y\n", "f:2: YAML syntax error: the character #x0001 may not stand in YAML"),
        ("a: !!int x\n", "f: a value is not what its tag (!!int, ...) or its digits say: invalid literal"),
        ("a: !!bool x\n", "f: a value is not what its tag"),
        ("a: !!timestamp x\n", "f: a value is not what its tag"),
        ("a: " + "1" * 5000, "f: a value is not what its tag"),
        ("a: " + "[" * 1000, "f: lists and mappings are nested too deep"),
    ],
)
def test_text_that_would_break_the_parser_is_one_message(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, source="f")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("!!int x", "o: a value is not what its tag"),
        ("9" * 5000, "o: a value is not what its tag"),
        ("{turns: 4, turns: 5}", "o:1: turns is said twice"),
        ("{1: 4}", "o: 1: keys must be text"),
        ("&a [*a]", "o:1: a value holds itself"),
        ("[" * 1000, "o: lists and mappings are nested too deep"),
        ("a\x01", "o: the character #x0001 may not stand in YAML"),
    ],
)
def test_an_override_that_would_break_the_parser_is_one_message(raw: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_scalar(raw, source="o")
    assert said in str(caught.value)


def test_an_alias_used_twice_has_lines_in_both_places() -> None:
    document = parse_yaml("a: &a\n  x: 1\nb: *a\n", source="f")
    assert document.tree == {"a": {"x": 1}, "b": {"x": 1}}
    assert document.lines == {"a": 1, "a.x": 2, "b": 3, "b.x": 2}
