import shutil

import pytest

from areal_like.rpc.security import private_socket_dir


@pytest.fixture
def socket_dir():
    """A private folder with a path short enough for sockets."""
    folder = private_socket_dir()
    yield folder
    shutil.rmtree(folder)
