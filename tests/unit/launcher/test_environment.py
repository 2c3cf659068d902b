from __future__ import annotations

import os

import pytest

from launcher.child import run_token
from launcher.devices import this_machine
from launcher.environment import child_environment, quiet_own_threads, thread_environment


def test_a_child_inherits_and_is_told_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    variables = child_environment(threads=2, token="t", run_id="r", extra={"MKL_NUM_THREADS": "5"})
    assert variables["PATH"] == os.environ["PATH"]
    assert (variables["OMP_NUM_THREADS"], variables["MKL_NUM_THREADS"]) == ("2", "5")
    assert variables["PYTHONPATH"] == f"{os.getcwd()}{os.pathsep}/elsewhere"
    assert variables["AREAL_LIKE_PARENT_PID"] == str(os.getpid())
    assert (variables["AREAL_LIKE_TOKEN"], variables["AREAL_LIKE_RUN_ID"]) == ("t", "r")


def test_train_ranks_of_one_host_listen_on_loopback_unless_the_user_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    assert child_environment(threads=1, token="t", run_id="r")["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert child_environment(threads=1, token="t", run_id="r")["GLOO_SOCKET_IFNAME"] == "eth0"


def test_the_controllers_own_threads_are_one_unless_the_user_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in thread_environment(1):
        monkeypatch.setenv(name, "noted")  # so that leaving the test removes what it sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    quiet_own_threads()
    assert (os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]) == ("7", "1")


def test_a_role_started_by_hand_is_told_how_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AREAL_LIKE_TOKEN", raising=False)
    with pytest.raises(RuntimeError, match="roles are started by `areal-like run`"):
        run_token()


def test_this_machine_has_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert this_machine().cores >= 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert this_machine().gpus == 0
