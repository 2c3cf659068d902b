"""What contract tests share: for each engine a server that lives as long as the session, and a line to it per test."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakSet

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from overruns import watched
from subjects import (
    HUNG,
    ROOT,
    SUBJECTS,
    TOKEN,
    ServerProcess,
    Subject,
    bucket_bytes_of,
    build_tiny,
    capabilities_of,
    load_model,
    load_tokenizer,
    perturbed,
    python_of,
    reference_logprobs,
    running,
)

from areal_like.api.generation import GenerationHyperparameters, ModelRequest, ModelResponse
from areal_like.api.weights import InterruptMode, Manifest, TransportKind
from areal_like.client.generation import RemoteEngine
from areal_like.client.health import HealthPolicy
from areal_like.client.pool import ServerPool
from areal_like.client.retry import RetryPolicy
from areal_like.client.stitching import TextRules
from areal_like.inference.backends import get_backend
from areal_like.inference.backends.base import Capabilities, LinkSettings, ServerLink
from areal_like.weights.channel import WeightChannel
from areal_like.weights.segments import list_segments, remove_segments
from areal_like.weights.transports.base import WeightWriter, make_writer

#: environment variable: every engine gets the embedded one's small random model; much quicker, while one develops
TINY = "AREAL_LIKE_CONTRACT_TINY"
#: one for the whole session: a server that lives through many tests never sees a version again
_VERSIONS = itertools.count(1)
_KEPT = 2
#: in which lines are open
_LOOPS: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with watched(item, _LOOPS):
        yield


def _parameters() -> list[Any]:
    marks = {"embedded": []}
    return [pytest.param(name, marks=marks.get(name, [pytest.mark.engines])) for name in SUBJECTS]


@pytest.fixture(scope="session", params=_parameters())
def subject(request: pytest.FixtureRequest) -> Subject:
    found = SUBJECTS[request.param]
    if found.name != "embedded" and not python_of(found.name).exists():
        pytest.skip(f"no .venv-{found.name}: make engines")
    if found.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("this process sees no GPU")
    return replace(found, long=max(found.long, 440)) if os.environ.get(TINY) else found


@pytest.fixture(scope="session")
def capabilities(subject: Subject) -> Capabilities:
    """Of the version that is tested."""
    return capabilities_of(subject)


@pytest.fixture(scope="session")
def model_path(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if subject.name == "embedded" or os.environ.get(TINY):
        return build_tiny(tmp_path_factory.mktemp("tiny-llama"))
    path = ROOT / "models" / "smollm2"
    if not path.exists():
        pytest.skip("no models/smollm2: make smollm2")
    return path


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def server(subject: Subject, model_path: Path, folder: Path) -> Iterator[ServerProcess]:
    """Shared by every test that leaves it whole."""
    with running(subject, model_path, folder) as started:
        yield started


@pytest.fixture(scope="session")
def trained(subject: Subject, model_path: Path) -> Any:
    """The trainer's model, in the dtype that travels."""
    return load_model(model_path, subject.dtype)


@pytest.fixture(scope="session")
def oracle(subject: Subject, model_path: Path) -> Any:
    """The same model in float32, into which any version can be put."""
    return load_model(model_path, "float32").eval().to(subject.device)


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Any:
    return load_tokenizer(model_path)


@dataclass(slots=True, kw_only=True)
class Trainer:
    """Exports version v of a model. ``change`` may spoil what is exported."""

    model: Any
    writer: WeightWriter
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = field(default=lambda weights: weights)

    made: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    packed: dict[int, Manifest] = field(default_factory=dict)

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """Making them takes seconds on a real model; the last two are kept."""
        if version not in self.made:
            self.made[version] = perturbed(self.model, version)
            for older in sorted(self.made)[:-_KEPT]:
                del self.made[older]
        return self.made[version]

    def pack(self, version: int, incarnation: int = 0) -> Manifest:
        return self.writer.write(version, incarnation, iter(self.change(self.weights(version)).items()))

    async def export_weights(self, version: int, incarnation: int) -> Manifest:
        packed = self.packed.pop(version, None)
        return packed if packed and packed.incarnation == incarnation else self.pack(version, incarnation)


@dataclass(slots=True, kw_only=True)
class Line:
    """An engine over one server, and a channel that publishes to it."""

    subject: Subject
    server: ServerProcess
    link: ServerLink
    pool: ServerPool
    engine: RemoteEngine
    channel: WeightChannel
    trainer: Trainer
    oracle: Any
    run_id: str
    link_version: str
    version: int = 0

    async def join(self, server: ServerProcess, transport: TransportKind) -> None:
        """Another server, for the next publication on."""
        settings = LinkSettings(token=TOKEN, version=self.link_version, transport=transport)
        link = get_backend(self.subject.name).connect(server.name, server.url, settings)
        await self.pool.add(server.name, server.url, link.control, link.dialect)

    def prepare(self, weights: dict[str, torch.Tensor] | None = None) -> int:
        """Make the weights of the next version, so that publishing it takes no longer than it must; or take those."""
        version = next(_VERSIONS)
        if weights is not None:
            self.trainer.made[version] = weights
        self.trainer.weights(version)
        return version

    def pack(self, weights: dict[str, torch.Tensor] | None = None) -> int:
        """As :meth:`prepare`, and pack it: what is left of publishing it is shorter than any long answer."""
        version = self.prepare(weights)
        self.trainer.packed[version] = self.trainer.pack(version)
        return version

    async def publish(self, version: int | None = None) -> int:
        """Publish a version that the server has not seen, and return it."""
        version = version or self.prepare()
        await self.channel.publish(version)
        self.version = version
        return version

    async def ask(self, prompt: list[int], **gconfig: Any) -> ModelResponse:
        """``gconfig``: sampling parameters, and the request's own ``seed`` and ``rid``."""
        own = {name: gconfig.pop(name) for name in ("seed", "rid") if name in gconfig}
        settings = GenerationHyperparameters(**{"ignore_eos": True, **gconfig})
        return await self.engine.agenerate(ModelRequest(input_ids=prompt, gconfig=settings, **own))

    async def in_hand(self, count: int = 1) -> None:
        """Return once the server has ``count`` of the requests that are asked.

        Raises:
            AssertionError: they were answered before they were seen there: ask for more tokens.
        """
        await asyncio.sleep(0)  # tasks that ask begin
        async with asyncio.timeout(HUNG):
            while (await self.link.control.health(timeout=HUNG)).in_flight < count:
                assert self.engine.statistics().in_flight >= count, "answered before they were seen in hand"
                await asyncio.sleep(0.01)

    def differences(self, answer: ModelResponse, version: int, **how: float) -> list[float]:
        """|log-prob − reference| of each token under the weights of ``version``; infinite where that rules it out."""
        tokens = [*answer.input_tokens, *answer.output_tokens]
        expected = reference_logprobs(
            self.oracle, self.trainer.weights(version), tokens, answer.output_len, **{"temperature": 1.0, **how}
        )
        return [abs(ours - theirs) for ours, theirs in zip(answer.output_logprobs, expected, strict=True)]

    def distance(
        self, answer: ModelResponse, version: int, first: int = 0, last: int | None = None, **how: float
    ) -> float:
        """The mean over tokens [first, last)."""
        return fmean(self.differences(answer, version, **how)[first:last])


@pytest.fixture(scope="session")
def open_line(
    subject: Subject, capabilities: Capabilities, model_path: Path, trained: Any, oracle: Any, tokenizer: Any
) -> Any:
    """Opens a :class:`Line` to a server; the server's first version is published. Deadlines are for what hangs.

    Without an ``interrupt`` it is keep, or recompute for a version that cannot keep.
    """

    bucket_bytes = bucket_bytes_of(model_path)
    kept = InterruptMode.KEEP in capabilities.interrupts
    gentlest = InterruptMode.KEEP if kept else InterruptMode.RECOMPUTE

    @asynccontextmanager
    async def opened(
        server: ServerProcess,
        *,
        interrupt: InterruptMode | None = None,
        transport: TransportKind = TransportKind.SHM,
        timeout: float = HUNG,
        update_timeout: float = HUNG,
        publish: bool = True,
    ) -> AsyncIterator[Line]:
        _LOOPS.add(asyncio.get_running_loop())
        run_id = f"contract-{uuid.uuid4().hex[:12]}"
        backend = get_backend(subject.name)
        version = await backend.version(server.url, token=TOKEN, timeout=HUNG)
        settings = LinkSettings(token=TOKEN, version=version, transport=transport)
        link = backend.connect(server.name, server.url, settings)
        async with AsyncExitStack() as stack:
            stack.callback(_nothing_left, run_id)
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="contract-")))
            writer = make_writer(transport, run_id=run_id, directory=folder, bucket_bytes=bucket_bytes)
            stack.callback(writer.close)
            pool = await stack.enter_async_context(ServerPool(HealthPolicy(timeout=HUNG / 3, readmit_after=0.2)))
            await pool.add(server.name, server.url, link.control, link.dialect)
            rules = TextRules(decode=tokenizer.decode)
            engine = await stack.enter_async_context(
                RemoteEngine(pool, token=TOKEN, timeout=timeout, retry=RetryPolicy(first=0.05, limit=0.5), rules=rules)
            )
            trainer = Trainer(model=trained, writer=writer)
            stack.callback(trainer.made.clear)  # gigabytes, which a cycle of references would keep
            channel = WeightChannel(trainer, pool, interrupt=interrupt or gentlest, timeout=update_timeout)
            line = Line(
                subject=subject, server=server, link=link, pool=pool, engine=engine, channel=channel, trainer=trainer,
                oracle=oracle, run_id=run_id, link_version=version,
            )  # fmt: skip
            if publish:
                await line.publish()
            yield line

    return opened


def _nothing_left(run_id: str) -> None:
    """In shared memory."""
    left = list_segments(run_id)
    remove_segments(run_id)
    assert left == ()


@pytest.fixture
async def line(open_line: Any, server: ServerProcess) -> AsyncIterator[Line]:
    """The shared server under a version of its own, over shm."""
    async with open_line(server) as opened:
        yield opened
