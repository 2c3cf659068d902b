"""A trainer that is killed cannot clean up: its segments are found and removed by the run's id."""

from __future__ import annotations

import signal
import subprocess
import sys

from areal_like.weights.segments import list_segments, remove_segments

_TRAIN = """
import sys, time
from pathlib import Path
import torch
from areal_like.api.weights import TransportKind
from areal_like.weights.transports.base import make_writer
writer = make_writer(TransportKind.SHM, run_id=sys.argv[1], directory=Path("unused"))
for version in range(2):
    writer.write(version, 0, [("a", torch.ones(1000))])
print("written", flush=True)
time.sleep(60)
"""


def test_what_a_killed_trainer_leaves_is_listed_and_removed(run_id: str) -> None:
    with subprocess.Popen([sys.executable, "-c", _TRAIN, run_id], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "written\n"
        trainer.send_signal(signal.SIGKILL)
    names = list_segments(run_id)
    assert len(names) == 2
    assert remove_segments(run_id) == names
    assert list_segments(run_id) == ()
