"""What asynchrony gives on this machine: the demo at several η, one after the other, in one run.

``python benchmarks/async_vs_sync.py [--out FILE]`` prints steps/s, seconds until the training reward reaches 0.9, and
final success for η = 0, 1, 2, 4. The same seeds everywhere; runs of one seed stand beside each other, so that a machine
that gets slower in the course of the benchmark does not favour one η.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.demo_runs import ROOT, DemoRun, leave_on_signals, run_demo, write_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eta", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path, help="JSON file for the result; default: it is only printed")
    parser.add_argument("overrides", nargs="*", help="key=value, for every run")
    arguments = parser.parse_args()
    leave_on_signals()
    runs: dict[int, list[DemoRun]] = {eta: [] for eta in arguments.eta}
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            for eta in arguments.eta:
                run = run_demo(
                    seed=seed,
                    models=ROOT / "models",
                    runs=Path(folder),
                    trial=f"eta-{eta}-seed-{seed}",
                    overrides=[f"rollout.max_head_offpolicyness={eta}", *arguments.overrides],
                )
                runs[eta].append(run)
                print(f"eta {eta} seed {seed}: {_row(eta, [run])}", flush=True)
    rows = [_row(eta, found) for eta, found in runs.items()]
    print(f"\n{'η':>2} {'steps/s':>8} {'vs η=0':>7} {'s to 0.9':>9} {'final':>6} {'lag mean':>9} {'lag max':>8}")
    for row in rows:
        reached = "–" if row["seconds_to_0.9"] is None else f"{row['seconds_to_0.9']:.1f}"
        speed = row["steps_per_second"] / rows[0]["steps_per_second"]
        print(
            f"{row['eta']:>2} {row['steps_per_second']:>8.2f} {speed:>6.2f}x {reached:>9} {row['eval_after']:>6.3f} "
            f"{row['lag_mean']:>9.2f} {row['lag_max']:>8}"
        )
    if arguments.out is not None:
        facts = {"seeds": arguments.seeds, "overrides": arguments.overrides}
        write_result(arguments.out, {"benchmark": "async_vs_sync", **facts, "rows": rows})


def _row(eta: int, runs: list[DemoRun]) -> dict[str, float | int | None]:
    """Means over seeds; None where a seed never reached 0.9."""
    reached = [run.seconds_to(0.9) for run in runs]
    return {
        "eta": eta,
        "steps_per_second": fmean(run.steps_per_second for run in runs),
        "seconds_to_0.9": None if None in reached else fmean(s for s in reached if s is not None),
        "eval_after": fmean(run.summary["eval_after"] for run in runs),
        "lag_mean": fmean(run.summary["lag_mean"] for run in runs),
        "lag_max": max(run.summary["lag_max"] for run in runs),
        "wall_seconds": fmean(run.wall_seconds for run in runs),
    }


if __name__ == "__main__":
    main()
