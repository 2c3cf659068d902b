"""One rank of several: runs every scenario and writes down what it found.

Usage: rank_program.py RANK RANKS SHARD_SIZE RENDEZVOUS OUT_DIR MODEL_DIR TIED_MODEL_DIR [SNAPSHOTS]

SNAPSHOTS, where other ranks have written one, is read; OUT_DIR/snapshots is written.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from train_cases import KINDS, SCENARIOS, cases, snapshot_read, snapshot_written

from areal_like.train.parallel import process_group


def main(rank: int, ranks: int, shard_size: int, rendezvous: str, out: Path, *folders: Path) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    with process_group(
        rank=rank, world_size=ranks, rendezvous=rendezvous, device=device, timeout=60, shard_size=shard_size
    ) as parallel:
        for kind, name in cases(ranks):
            weights, metrics = SCENARIOS[name](parallel, folders[KINDS.index(kind)])
            np.savez(out / f"{kind}-{name}-{rank}.npz", **weights)
            (out / f"{kind}-{name}-{rank}.json").write_text(json.dumps(metrics))
        np.savez(out / f"written-{rank}.npz", **snapshot_written(parallel, folders[1], out / "snapshots"))
        for snapshots in folders[2:]:
            np.savez(out / f"read-{rank}.npz", **snapshot_read(parallel, folders[1], snapshots))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4], *map(Path, sys.argv[5:]))
