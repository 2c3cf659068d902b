"""The ablation trains on data that is exactly η versions old, and its tables say what the runs came to."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from areal_like.config.load import load_config
from launcher.tiny_models import GuessSettings, TinyLlama, build_guess

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def ablation() -> Iterator[ModuleType]:
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        import staleness_ablation

        yield staleness_ablation
    finally:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ablation")
    size = TinyLlama(hidden=16, layers=1, heads=2)
    build_guess(folder / "guess-1", 1, GuessSettings(size=size, warm_steps=2, warm_rows=8))
    return folder


@pytest.mark.parametrize("eta", [0, 2])
def test_every_token_has_the_lag_that_is_simulated(ablation: ModuleType, models: Path, eta: int) -> None:
    folder = models / "guess-1"
    paths = [f"model.path={folder}/model", f"train_dataset.path={folder}/train.jsonl"]
    config = load_config(ROOT / "configs/guess_cpu.yaml", [*paths, "total_train_steps=4", "gconfig.n_samples=2"])
    seen = []
    for policy, rows in ablation.stale_training(config, eta):
        seen.append({int(v) for row in rows for v in row.versions[row.loss_mask == 1]})
        assert policy.version == len(seen) - 1
    assert seen == [set(), *({max(0, step - eta)} for step in range(4))]


def test_a_cell_is_trained_and_examined(ablation: ModuleType, models: Path) -> None:
    cell = ablation.Cell(task="guess", method="naive PPO", eta=1, seed=1, steps=3, evaluations=3, models=str(models))
    outcome = ablation.run_cell(cell)
    assert len(outcome.curve) == 4
    assert all(0 <= accuracy <= 1 for accuracy in (*outcome.curve, outcome.final))
    assert outcome.area == pytest.approx(sum(outcome.curve) / 4)


def test_the_table_by_hand_and_the_picture(
    ablation: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def outcome(method: str, eta: int, seed: int, final: float) -> object:
        return ablation.Outcome(
            task="guess", method=method, eta=eta, seed=seed, curve=(0.0, final), final=final, area=0.5, cpu_seconds=1.0
        )

    found = [outcome("decoupled, truncated", 0, seed, final) for seed, final in ((1, 0.8), (2, 0.9))]
    found += [outcome(method, 4, 1, 0.5) for method in ablation.METHODS]
    assert ablation.table(found, "guess", "final") == [
        ["η", "no correction", "naive PPO", "decoupled", "decoupled, truncated"],
        ["0", *["0.850 ± 0.071"] * 4],
        ["4", *["0.500"] * 4],
    ]
    ablation.show(found)
    assert "| 4 | 0.500 | 0.500 | 0.500 | 0.500 |" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert ablation.draw(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["no correction", "naive PPO", "decoupled", "decoupled, truncated"])
def test_methods_are_experiments_that_load(ablation: ModuleType, name: str) -> None:
    for task in ablation.TASKS.values():
        actor = load_config(ROOT / task.config, [*ablation.METHODS[name], *task.overrides]).actor
        assert json.loads(actor.model_dump_json())["objective"] in ("ppo", "decoupled_ppo")
