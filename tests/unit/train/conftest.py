import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from train_cases import build_model

from areal_like.train.parallel import process_group


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("model") / "untied")


@pytest.fixture(scope="session")
def tied_model_dir(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("model") / "tied", tied=True)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A process group of this process alone."""
    rendezvous = f"file://{tmp_path_factory.mktemp('rendezvous') / 'file'}"
    with process_group(rank=0, world_size=1, rendezvous=rendezvous, device=torch.device("cpu"), timeout=60) as parallel:
        yield parallel
