"""One rank of several: runs every scenario and writes down what it found.

Usage: rank_program.py RANK RANKS RENDEZVOUS OUT_DIR MODEL_DIR TIED_MODEL_DIR
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from train_cases import SCENARIOS

from areal_like.train.parallel import process_group


def main(rank: int, ranks: int, rendezvous: str, out: Path, folders: dict[str, Path]) -> None:
    torch.set_num_threads(1)
    with process_group(
        rank=rank, world_size=ranks, rendezvous=rendezvous, device=torch.device("cpu"), timeout=60
    ) as parallel:
        for kind, folder in folders.items():
            for name, scenario in SCENARIOS.items():
                weights, metrics = scenario(parallel, folder)
                np.savez(out / f"{kind}-{name}-{rank}.npz", **weights)
                (out / f"{kind}-{name}-{rank}.json").write_text(json.dumps(metrics))


if __name__ == "__main__":
    main(
        int(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        Path(sys.argv[4]),
        {"untied": Path(sys.argv[5]), "tied": Path(sys.argv[6])},
    )
