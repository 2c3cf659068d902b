"""What a run and an evaluation have in common: child processes, the server pool, the user's code. Start-up is
``async with``; leaving ends every process and removes every socket and shared-memory segment."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from areal_like.api.engine import InferenceEngine
from areal_like.api.generation import GenerationHyperparameters
from areal_like.api.workflow import RewardFunction, RolloutWorkflow, Tokenizer
from areal_like.client.generation import RemoteEngine
from areal_like.client.health import HealthPolicy
from areal_like.client.pool import ServerPool
from areal_like.client.retry import RetryPolicy
from areal_like.client.stitching import TextRules
from areal_like.config.experiment import ExperimentConfig
from areal_like.config.paths import RunPaths
from areal_like.control.evaluation import EvaluationSettings, Evaluator
from areal_like.control.registry import Registry
from areal_like.errors import RequestError, ServerUnavailable
from areal_like.inference.backends.base import ServerLink
from areal_like.rollout.convert import to_trajectories
from areal_like.rollout.datasets import read_jsonl
from areal_like.rollout.episode import Converter
from areal_like.rollout.plugins import build_workflow
from areal_like.rollout.rewards import open_rewards
from areal_like.rollout.tokenizer import load_tokenizer
from areal_like.rpc.server import RpcServer
from areal_like.train.spec import TrainWorkerSpec
from launcher.child import TOKEN_VARIABLE
from launcher.devices import this_machine
from launcher.engines import open_link, server_part, servers_token
from launcher.incarnations import claim, claim_incarnation
from launcher.local import LocalLauncher
from launcher.model_files import vocabulary_size
from launcher.processes import INFERENCE, TRAIN, PlannedProcess, plan_processes
from launcher.roles import RoleSpec

#: seconds children get to end by themselves: with the loop's own grace it keeps Ctrl-C below 10 s
TERM_GRACE = 2.0
KILL_GRACE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """One launch: its experiment, its folder, and the secrets made for it."""

    config: ExperimentConfig
    paths: RunPaths
    run_id: str
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The processes of a run and how they report to us."""

    context: RunContext
    launcher: LocalLauncher
    registry: Registry
    controller_address: str

    def socket(self, name: str) -> str:
        return f"ipc://{self.launcher.socket_folder}/{name}"

    async def start(self, planned: PlannedProcess, part: str, *, entry: str | None = None) -> None:
        """Start one planned process with the JSON spec of its part; ``entry``: its program, if not that of its role."""
        spec = RoleSpec(role=planned.role, index=planned.index, controller_address=self.controller_address, part=part)
        await self.launcher.start(
            planned.role,
            planned.index,
            spec.model_dump_json(),
            threads=planned.threads,
            entry=entry,
        )


@asynccontextmanager
async def open_session(context: RunContext) -> AsyncIterator[Session]:
    """The launcher and the controller's registration endpoint."""
    launcher = LocalLauncher(
        paths=context.paths,
        run_id=context.run_id,
        token=context.token,
        term_grace=TERM_GRACE,
        kill_grace=KILL_GRACE,
    )
    registry = Registry()
    async with launcher, RpcServer(f"ipc://{launcher.socket_folder}/controller", registry.methods) as endpoint:
        yield Session(context=context, launcher=launcher, registry=registry, controller_address=endpoint.address)


def planned(context: RunContext, role: str) -> list[PlannedProcess]:
    return [p for p in plan_processes(context.config, this_machine()) if p.role == role]


async def start_servers(session: Session) -> None:
    """Start every inference server; they load while other processes do. None where others started them."""
    for process in planned(session.context, INFERENCE):
        part = server_part(session.context.config, process)
        await session.start(process, part.spec, entry=part.entry)


async def start_trainer(session: Session, *, store_address: str) -> None:
    """Start every train rank; they meet at a file of the run's private folder."""
    config, context = session.context.config, session.context
    ranks = planned(context, TRAIN)
    for process in ranks:
        spec = TrainWorkerSpec(
            rank=process.index,
            world_size=len(ranks),
            device=process.device,
            rendezvous=f"file://{session.launcher.socket_folder}/rendezvous",
            model=config.model,
            actor=config.actor,
            critic=config.critic,
            ref=config.ref,
            gconfig=config.gconfig,
            weights=config.weights,
            store_address=store_address,
            bind=session.socket(process.name),
            run_dir=context.paths.root,
            run_id=context.run_id,
            seed=config.seed,
            total_train_steps=config.total_train_steps,
        )
        await session.start(process, spec.model_dump_json())


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Servers that answer, and the engine over them.

    ``incarnation`` is that of this run's control calls: servers of others may have heard those of an earlier run.
    """

    pool: ServerPool
    engine: RemoteEngine
    incarnation: int


@asynccontextmanager
async def open_serving(session: Session, tokenizer: Tokenizer, *, commands: bool = True) -> AsyncIterator[Serving]:
    """Wait for the servers and join them. They get requests after their first receipt.

    ``commands``: weights will be published, for which servers of others obey this run alone from here on.

    Raises:
        InfrastructureError: a server did not become ready in time, or one that we were given does not answer.
        ConfigError: the engine's version cannot do what the experiment asks.
    """
    config = session.context.config
    rollout, token = config.rollout, servers_token(config, session.context.token)
    addresses = await _server_addresses(session)
    eos = tokenizer.eos_token_id
    rules = TextRules(decode=tokenizer.decode, eos_token_ids=frozenset() if eos is None else frozenset({eos}))
    incarnation, run_id = 0, session.context.run_id

    async def relink(name: str, url: str) -> ServerLink:
        """To a server that somebody has started again, unless another run has it by now."""
        link = await open_link(config, name, url, token)
        if rollout.servers and commands:
            async with AsyncExitStack() as refused:
                refused.push_async_callback(link.control.aclose)
                await claim(link.control, incarnation, run_id=run_id, timeout=rollout.control_timeout)
                refused.pop_all()
        return link

    async with ServerPool(HealthPolicy(timeout=rollout.control_timeout)) as pool:
        for name, url in addresses.items():
            try:
                link = await open_link(config, name, url, token)
                await pool.add(name, url, link.control, link.dialect, partial(relink, name, url))
            except RequestError as error:
                raise ServerUnavailable(
                    f"rollout.servers: {url} refuses this run: {error}; {TOKEN_VARIABLE} must hold the token that it "
                    "was started with, and its flags must be those of `areal-like serve`"
                ) from error
            except ServerUnavailable as error:
                if not rollout.servers:
                    raise
                raise ServerUnavailable(
                    f"rollout.servers: {url} does not answer as a server should: {error}; start it, or name where it is"
                ) from error
        if rollout.servers and commands:
            controls = [pool.weight_server(name) for name in addresses]
            incarnation = await claim_incarnation(controls, run_id=run_id, timeout=rollout.control_timeout)
        pool.command(incarnation)
        retry = RetryPolicy(retries=rollout.request_retries)
        async with RemoteEngine(pool, token=token, timeout=rollout.request_timeout, retry=retry, rules=rules) as engine:
            yield Serving(pool=pool, engine=engine, incarnation=incarnation)


async def _server_addresses(session: Session) -> dict[str, str]:
    """URLs by name: of our own servers once they are ready, or of those we were given."""
    rollout = session.context.config.rollout
    if rollout.servers:
        return {f"{INFERENCE}-{i}": url for i, url in enumerate(rollout.servers)}
    ready = await session.registry.expect(INFERENCE, rollout.spec.data, rollout.start_timeout)
    return {f"{server.role}-{server.index}": server.address for server in ready}


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCode:
    """The user's reward function, running, and what a workflow is built from."""

    config: ExperimentConfig
    reward: RewardFunction | None
    tokenizer: Tokenizer
    convert: Converter

    def workflow(self, gconfig: GenerationHyperparameters) -> RolloutWorkflow:
        return build_workflow(
            self.config.workflow,
            reward_fn=self.reward,
            gconfig=gconfig,
            tokenizer=self.tokenizer,
            workflow_args=self.config.workflow_args,
        )

    def evaluator(self, engine: InferenceEngine) -> Evaluator | None:
        """Over the validation set; None where the experiment has none."""
        config = self.config
        if config.valid_dataset is None:
            return None
        return Evaluator(
            workflow=self.workflow(config.evaluation_gconfig),
            engine=engine,
            rows=read_jsonl(config.valid_dataset.path, max_rows=config.valid_dataset.max_prompts),
            convert=self.convert,
            settings=EvaluationSettings(
                seed=config.seed,
                n_samples=config.evaluator.n_samples,
                max_concurrent=config.evaluator.max_concurrent,
                episode_timeout=config.rollout.episode_timeout,
                episode_retries=config.rollout.episode_retries,
            ),
        )


@asynccontextmanager
async def open_user_code(context: RunContext) -> AsyncIterator[UserCode]:
    """The reward pool, if the experiment names a reward function, and the tokenizer."""
    config = context.config
    async with AsyncExitStack() as stack:
        reward: RewardFunction | None = None
        if config.reward_fn is not None:
            rewards = open_rewards(config.reward_fn, config.rewards, log_path=context.paths.logs / "rewards.log")
            reward = await stack.enter_async_context(rewards)
        yield UserCode(
            config=config,
            reward=reward,
            tokenizer=load_tokenizer(config.model.path),
            convert=partial(to_trajectories, vocabulary_size=vocabulary_size(Path(config.model.path))),
        )
