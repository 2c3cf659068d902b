"""Part c of two_gpu.py: somebody is killed while weights are on their way between two GPUs. What does that cost?

``server_killed``: the server's processes get SIGKILL when the second bucket is leaving the trainer.
``trainer_killed``: a trainer of its own process kills itself at that moment. Without GPUs the same over gloo.

``python two_gpu_deaths.py ENGINE NAME URL SHAPE VERSION`` is that trainer; two_gpu.py starts it, with the server's
token in ``AREAL_LIKE_TOKEN``. To run all of it:

    python benchmarks/gpu/two_gpu.py --parts c --python .venv-vllm-gpu/bin/python
    python benchmarks/gpu/two_gpu.py --parts c --quick --engine embedded                   # without GPUs
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent)]

from broadcast_watch import watched_broadcasts  # noqa: E402
from demo_runs import bound  # noqa: E402
from sync_policy import SYNC_SHAPES, Policy  # noqa: E402
from sync_runs import Line, Load, Watched, Way, open_line  # noqa: E402
from sync_servers import TOKEN, Server  # noqa: E402
from update_readings import PLANS, Bench, Plan, serving  # noqa: E402

from areal_like.api.weights import TransportKind  # noqa: E402
from areal_like.errors import ArealLikeError, WeightUpdateError  # noqa: E402

#: seconds until a GPU that should be free, or a server that should answer, is given up
PATIENCE = 90.0
#: seconds between two looks
_LOOK = 0.1
#: bytes by which a second communicator may differ from the first
_SLACK = 128 * 2**20


def way_of(plan: Plan, device: torch.device, incarnation: int) -> Way:
    """Over NCCL, or over gloo without GPUs; in buckets small enough that there are several."""
    over = Way(kind=TransportKind.COLLECTIVE, incarnation=incarnation, timeout=PATIENCE)
    if device.type == "cuda":
        return replace(over, group="nccl", bucket_bytes=None if plan.shape == "6b" else 64 * 2**20)
    return replace(over, bucket_bytes=2**18)


async def deaths(bench: Bench, plan: Plan, policy: Policy, first: Server, rows: dict[str, Any]) -> None:
    """Both, on ``first`` and on the server that is started in its place; ``rows`` has what was found, by name."""
    with ExitStack() as servers:
        rows["server_killed"] = row = {}
        second = await server_killed(bench, plan, policy, first, (servers, row))
        bench.say(f"a killed server: {'held' if row['held'] else 'DID NOT HOLD'}")
        bench.write()
        rows["trainer_killed"] = row = {}
        await trainer_killed(bench, plan, policy, second, row)
        bench.say(f"a killed trainer: {'held' if row['held'] else 'DID NOT HOLD'}")


# -- the server dies --


async def server_killed(
    bench: Bench, plan: Plan, policy: Policy, first: Server, into: tuple[ExitStack, dict[str, Any]]
) -> Server:
    """Seconds until the trainer is free, until a new server has the version, and what comes after.

    ``into``: where the new server, which is returned, is to be ended, and where to write.
    """
    servers, row = into
    row["memory"] = memory = {"before": _used(bench.device)}
    async with open_line(policy, way_of(plan, bench.device, 0), bench.folder) as line:
        await line.add(first)
        row["before"] = await line.update(bench.next_version())
        memory["with a group"] = _used(bench.device)
        load = Load(line, plan.requests, plan.answer_tokens)
        row["running"] = await load.start()
        row |= await _kill_and_wait(bench, line, first)
        await line.remove(first)
        row["seconds_to_export_again"] = await _export_again(line, row["version"])
        memory["after the death"] = _used(bench.device)
        bench.say(f"the trainer is free: {_short(row)}")
        starting = serving(bench, plan, name="second", shared=False, transport="collective")
        second = await asyncio.to_thread(servers.enter_context, starting)
        row |= await _rejoin(bench, line, second)
        memory["with the second group"] = _used(bench.device)
        row["answers"] = await load.stop()
    row["first_group_freed"] = memory["with the second group"] - memory["with a group"] < _SLACK
    row["held"] = bool(
        row["killed_while_sending"]
        and row["trainer_works"]
        and row["first_group_freed"]
        and row["rejoined"]["right"]
        and row["after"]["right"]
        and row["answers"]["whole"]
    )
    return second


async def _kill_and_wait(bench: Bench, line: Line, server: Server) -> dict[str, Any]:
    killed: list[float] = []

    def kill() -> None:
        server.send(signal.SIGKILL)
        killed.append(time.monotonic())

    version = bench.next_version()
    await asyncio.to_thread(line.policy.renew, version)
    told = "it was published"
    with watched_broadcasts() as seen:
        seen.on_fatal = kill
        try:
            await line.channel.publish(version)
        except WeightUpdateError as error:
            told = str(error)
    ended = time.monotonic()
    done = _trainer_works(line.policy)
    works, free = [*done, None, None][:2]
    return {
        "version": version,
        "killed_while_sending": bool(killed) and told != "it was published",
        "told": told[:600],
        "seconds_until_publish_ended": ended - killed[0] if killed else None,
        "seconds_until_trainer_works": works - killed[0] if killed and works else None,
        "seconds_until_device_free": free - killed[0] if killed and free else None,
        "trainer_works": free is not None,
    }


async def _export_again(line: Line, version: int) -> float:
    """Seconds until the trainer has laid the version out anew, for whoever comes."""
    began = time.monotonic()
    with suppress(WeightUpdateError):  # nobody is there to get it
        await line.channel.publish(version)
    return time.monotonic() - began


def _trainer_works(policy: Policy) -> list[float]:
    """When a forward pass on the trainer's device had ended, and when all of its streams had; fewer where one hangs."""
    done: list[float] = []

    def work() -> None:
        policy.logprobs([5, 6, 7], [8, 9])  # waits for its own stream alone
        done.append(time.monotonic())
        policy.wait()
        done.append(time.monotonic())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return done


async def _rejoin(bench: Bench, line: Line, server: Server) -> dict[str, Any]:
    """A new server gets the version that the lost one did not, and updates go on."""
    began = time.monotonic()
    await line.add(server)
    receipt = await line.channel.readmit(server.name)
    seconds = time.monotonic() - began
    rejoined = await line.check()
    return {
        "seconds_to_start_another": server.seconds_to_start,
        "rejoined": {"seconds": seconds, "version": receipt.version, **rejoined},
        "after": await line.update(bench.next_version()),
    }


# -- the trainer dies --


async def trainer_killed(bench: Bench, plan: Plan, policy: Policy, server: Server, row: dict[str, Any]) -> None:
    """What the server says, and how long it takes until a new trainer's whole update mends it."""
    async with open_line(policy, way_of(plan, bench.device, 0), bench.folder) as line:
        await line.add(server)
        row["before"] = await line.update(bench.next_version())
        load = Load(line, plan.requests, plan.answer_tokens)
        row["running"] = await load.start()
        first = bench.next_version()
        bench.next_version()
        status, said = await _doomed_trainer(server, plan.shape, first)
        died = time.monotonic()
        row |= {"trainer_ended_with": status, "killed_while_sending": status == -signal.SIGKILL, "it_said": said}
        row["server_says"] = await _words_of(line.watched[server.name], died)
        bench.say(f"the server says: {row['server_says'][-1]}")
        async with open_line(policy, way_of(plan, bench.device, 2), bench.folder) as other:
            await _join_in_time(other, server)
            row["mended"] = await other.update(bench.next_version())
            row["seconds_until_mended"] = time.monotonic() - died
            row["after"] = await other.update(bench.next_version())
        row["answers"] = await load.stop()
    row["held"] = bool(row["killed_while_sending"] and row["mended"]["right"] and row["after"]["right"])


async def _doomed_trainer(server: Server, shape: str, version: int) -> tuple[int | None, str]:
    """Runs :func:`doomed` in a process of its own; its exit status, and the end of what it said."""
    command = bound([sys.executable, __file__, server.engine, server.name, server.url, shape, str(version)])
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output, env={**os.environ, "AREAL_LIKE_TOKEN": TOKEN}
        )
        try:
            async with asyncio.timeout(2 * PATIENCE):
                await process.wait()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
        output.seek(0)
        return process.returncode, output.read().decode(errors="replace")[-600:]


async def _words_of(control: Watched, died: float) -> list[dict[str, Any]]:
    """What the server says of itself, at once and until it stops changing or says what is wrong."""
    words: list[dict[str, Any]] = []
    while time.monotonic() - died < PATIENCE:
        now = await _word(control)
        if not words or {**words[-1], "after": 0} != {**now, "after": 0}:
            words.append({**now, "after": round(time.monotonic() - died, 2)})
        if now.get("error") or now.get("state") in ("failed", "idle", "applied"):
            break
        await asyncio.sleep(_LOOK)
    return words


async def _word(control: Watched) -> dict[str, Any]:
    try:
        health = await control.health(timeout=5.0)
        found = {"status": health.status, "version": health.version, "paused": health.paused}
        inner = getattr(control, "_status", None)
        if inner is not None:  # vLLM's workers tell more
            status = await inner(timeout=5.0)
            found |= {"state": status.state, "error": status.error[:300], "damaged": status.damaged}
        else:
            found["state"] = "idle"
        return found
    except ArealLikeError as error:
        return {"unavailable": f"{type(error).__name__}: {error}"[:200]}


async def _join_in_time(line: Line, server: Server) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return await line.add(server)
        except ArealLikeError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(_LOOK)


async def doomed(engine: str, name: str, url: str, shape: str, version: int) -> None:
    """Publishes one version, and ends in the middle of the next."""
    device = torch.device("cuda", 1) if torch.cuda.is_available() else torch.device("cpu")
    policy = Policy(SYNC_SHAPES[shape], device)
    with tempfile.TemporaryDirectory() as folder:
        async with open_line(policy, way_of(PLANS[shape], device, 1), Path(folder)) as line:
            await line.add(Server(engine=engine, name=name, url=url))
            await line.update(version)
            with watched_broadcasts() as seen:
                seen.on_fatal = lambda: os.kill(os.getpid(), signal.SIGKILL)
                await line.update(version + 1)


def _used(device: torch.device) -> int:
    """Bytes in use on the trainer's device, by whoever; 0 without one."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def _short(row: dict[str, Any]) -> str:
    seconds = row["seconds_until_device_free"]
    return f"{seconds:.2f} s after the kill" if seconds is not None else f"not sent: {row['told']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["vllm", "embedded"])
    parser.add_argument("name", help="of the server")
    parser.add_argument("url", help="of the server")
    parser.add_argument("shape", choices=sorted(PLANS))
    parser.add_argument("version", type=int, help="published whole; in the middle of the next it ends")
    given = parser.parse_args()
    if not os.environ.get("AREAL_LIKE_TOKEN"):
        parser.error("AREAL_LIKE_TOKEN is not set: it is the bearer token of the server")
    asyncio.run(doomed(given.engine, given.name, given.url, given.shape, given.version))


if __name__ == "__main__":
    main()
