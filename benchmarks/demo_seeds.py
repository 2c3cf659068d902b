"""Does the demo learn for every seed, and within its time? ``python benchmarks/demo_seeds.py --seeds 1 2 3 4 5``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.demo_runs import ROOT, leave_on_signals, run_demo, write_result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--out", type=Path, help="JSON file for the result; default: it is only printed")
    parser.add_argument("overrides", nargs="*", help="key=value, for every run")
    arguments = parser.parse_args()
    leave_on_signals()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            run = run_demo(
                seed=seed,
                models=ROOT / "models",
                runs=Path(folder),
                trial=f"seed-{seed}",
                overrides=arguments.overrides,
            )
            names = (
                "eval_before", "eval_after", "lag_mean", "lag_max", "interrupted_requests",
                "multi_version_trajectories", "generated_tokens",
            )  # fmt: skip
            row = {"seed": seed, "wall_seconds": round(run.wall_seconds, 1), **{k: run.summary[k] for k in names}}
            row |= {"steps": len(run.steps), "seconds_to_0.9": run.seconds_to(0.9)}
            rows.append(row)
            print(row, flush=True)
    if arguments.out is not None:
        write_result(arguments.out, {"benchmark": "demo_seeds", "overrides": arguments.overrides, "runs": rows})
    learned = sum(row["eval_before"] <= 0.5 and row["eval_after"] >= 0.9 for row in rows)
    print(f"{learned} of {len(rows)} seeds went from at most 0.5 to at least 0.9")
    return 0 if learned == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
