"""Tiny models and batches that the tests of the trainer share; the rank program imports them too."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from areal_like.algo.measured_cost import load_of
from areal_like.api.generation import GenerationHyperparameters
from areal_like.api.trajectory import Batch, GroupTag, PromptId, Trajectory, TrajectoryTag
from areal_like.config.actor import ActorConfig
from areal_like.config.critic import CriticConfig
from areal_like.config.reference import ReferenceConfig
from areal_like.train.critic import Critic, ValueModel, load_value_model
from areal_like.train.engine import TrainEngine
from areal_like.train.model import PolicyModel, load_language_model, replayed_sampling
from areal_like.train.plan import plan_update
from areal_like.train.ppo import Companions, PpoUpdate
from areal_like.train.reference import Reference
from areal_like.train.sft import SftUpdate, supervised_row
from areal_like.train.snapshot import SnapshotStore
from areal_like.train.stopwatch import Stopwatch

VOCABULARY = 19
EOS = 2


def build_model(
    folder: Path, *, tied: bool = False, heads: int = 4, kv_heads: int = 2, layers: int = 2, **extra
) -> Path:
    """A random Llama with grouped queries, and a file beside it that a checkpoint should carry along."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        initializer_range=0.6,
        tie_word_embeddings=tied,
        eos_token_id=EOS,
        **extra,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"note": "copied as it is"}))
    return folder


def exact_norms(model: torch.nn.Module) -> torch.nn.Module:
    """Let RMSNorm compute in the model's dtype. transformers rounds to float32 inside it, whatever the model's dtype,

    so a difference in the order of sums of 1e-16 could become one of 1e-7 by flipping a rounding.
    """
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = partial(_rms_norm, module)
    return model


def _rms_norm(module: LlamaRMSNorm, x: torch.Tensor) -> torch.Tensor:
    return module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)


def random_row(
    rng: np.random.Generator, *, group: str, episode: str, version: int, reward: float = 0.0, turns: int = 1
) -> Trajectory:
    """Prompt, then ``turns`` answers with environment text between them; log-probs near those of a random model."""
    tokens, mask, versions = list(rng.integers(3, VOCABULARY, rng.integers(1, 5))), [], []
    mask, versions = [0] * len(tokens), [-1] * len(tokens)
    for turn in range(turns):
        answer = int(rng.integers(1, 7))
        tokens += list(rng.integers(3, VOCABULARY, answer))
        mask += [1] * answer
        first = int(rng.integers(max(0, version - 2), version + 1))
        versions += sorted(int(rng.integers(first, version + 1)) for _ in range(answer))
        if turn + 1 < turns:
            tokens += [3, 4]
            mask += [0, 0]
            versions += [-1, -1]
    written = np.array(mask) == 1
    return Trajectory(
        token_ids=np.array(tokens, np.int32),
        loss_mask=np.array(mask, np.int32),
        logprobs=np.where(written, rng.normal(-2.5, 0.5, len(tokens)), 0).astype(np.float32),
        versions=np.array(versions, np.int32),
        reward=reward,
        group_id=group,
        episode_id=episode,
    )


def random_batch(
    *, groups: int = 4, seed: int = 0, version: int = 3, turns: int = 2, sizes: tuple[int, ...] = (3, 1, 4, 2)
) -> tuple[Batch, dict[str, Trajectory]]:
    """Groups of uneven size with rows of uneven length, and the store's contents by key."""
    rng = np.random.default_rng(seed)
    rows: dict[str, Trajectory] = {}
    for g in range(groups):
        for i in range(sizes[g % len(sizes)]):
            turn_count = int(rng.integers(1, turns + 1))
            rows[f"{g}/{i}"] = random_row(
                rng, group=f"g{g}", episode=f"g{g}e{i}", version=version, reward=float(i % 2), turns=turn_count
            )
    return batch_of(rows, version), rows


def batch_of(rows: dict[str, Trajectory], version: int) -> Batch:
    """Tags of ``rows`` (keys in order), grouped by group id."""
    by_group: dict[str, list[TrajectoryTag]] = {}
    for key, row in rows.items():
        written = row.versions[row.loss_mask == 1]
        tag = TrajectoryTag(
            key=key,
            group_id=row.group_id,
            episode_id=row.episode_id,
            length=row.length,
            loss_tokens=int((row.loss_mask == 1).sum()),
            reward=row.reward,
            oldest_version=int(written.min()) if written.size else version,
            newest_version=int(written.max()) if written.size else version,
        )
        by_group.setdefault(row.group_id, []).append(tag)
    groups = tuple(
        GroupTag(group_id=g, prompt=PromptId(epoch=0, index=i), attempt=0, stamp=0, trajectories=tuple(tags))
        for i, (g, tags) in enumerate(by_group.items())
    )
    return Batch(version=version, groups=groups)


def build_engine(
    folder: Path,
    parallel,
    actor: ActorConfig,
    *,
    gconfig: GenerationHyperparameters | None = None,
    dtype: torch.dtype = torch.float64,
    total_steps: int = 10,
    offload: bool = False,
) -> TrainEngine:
    model = load_language_model(
        folder,
        dtype=dtype,
        layout=actor.mb_spec.packing,
        gradient_checkpointing=actor.gradient_checkpointing,
        lora=actor.lora,
    )
    model = exact_norms(model).to(parallel.device)
    policy = PolicyModel(model, replayed_sampling(gconfig or GenerationHyperparameters(), model))
    return TrainEngine(policy, parallel, actor.optimizer, total_steps=total_steps, offload=offload)


def run_update(
    engine: TrainEngine,
    actor: ActorConfig,
    batch: Batch,
    rows: dict[str, Trajectory],
    companions: Companions | None = None,
):
    return PpoUpdate(engine, actor, lambda keys: [rows[key] for key in keys], companions).run(batch)


def build_critic(
    folder: Path,
    parallel,
    actor: ActorConfig,
    *,
    dtype: torch.dtype = torch.float64,
    total_steps: int = 10,
    **config,
) -> Critic:
    settings = CriticConfig.model_validate({"optimizer": {"lr": 2e-3}} | config)
    model = load_value_model(folder, dtype=dtype, layout=actor.mb_spec.packing)
    with torch.no_grad():  # a new head is 0; here values should differ
        model.score.weight.copy_(torch.linspace(-0.4, 0.5, model.score.weight.numel(), dtype=dtype)[None])
    model = exact_norms(model).to(parallel.device)
    engine = TrainEngine(ValueModel(model), parallel, settings.optimizer, total_steps=total_steps)
    return Critic(engine, settings, model.config)


def build_reference(folder: Path, parallel, actor: ActorConfig, *, dtype: torch.dtype = torch.float64) -> Reference:
    """The policy's own architecture with other weights, the same on all ranks."""
    model = exact_norms(load_language_model(folder, dtype=dtype, layout=actor.mb_spec.packing))
    shake(model)
    model = model.to(parallel.device)
    return Reference(PolicyModel(model, replayed_sampling(GenerationHyperparameters(), model)), parallel)


def shake(model: torch.nn.Module) -> None:
    """Move every weight a little, alike each time."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def weights_of(engine: TrainEngine) -> dict[str, np.ndarray]:
    """Whole tensors by name, as private copies."""
    return {name: tensor.to(torch.float64).cpu().numpy().copy() for name, tensor in engine.named_weights()}


def learned_by(engine: TrainEngine) -> dict[str, np.ndarray]:
    """Weights, and AdamW's means of the gradients so far, in which a wrong scale shows: whole, as private copies."""
    means = {key: tensor for key, tensor in engine.state().items() if key.startswith("mean/")}
    whole = {key: t.full_tensor() if isinstance(t, DTensor) else t for key, t in means.items()}
    return weights_of(engine) | {key: tensor.to(torch.float64).cpu().numpy().copy() for key, tensor in whole.items()}


def _actor(**changes) -> ActorConfig:
    return ActorConfig.model_validate({"optimizer": {"lr": 3e-3}, "ppo_n_minibatches": 2} | changes)


def _run(parallel, folder: Path, actor: ActorConfig, batch: Batch, rows, **kwargs):
    engine = build_engine(folder, parallel, actor, **kwargs)
    report = run_update(engine, actor, batch, rows)
    return learned_by(engine), report.metrics


def uneven_rows(parallel, folder: Path):
    return _run(parallel, folder, _actor(), *random_batch())


def packed_micro_batches(parallel, folder: Path):
    actor = _actor(mb_spec={"packing": "packed", "max_tokens_per_mb": 20}, aggregation="seq_mean_token_mean")
    return _run(parallel, folder, actor, *random_batch(seed=5))


def a_rank_without_rows(parallel, folder: Path):
    """One row in the first minibatch: with two ranks, one of them has nothing to do."""
    return _run(parallel, folder, _actor(), *random_batch(groups=2, sizes=(1, 2)))


def no_rank_has_more_than_one_row(parallel, folder: Path):
    actor = _actor(ppo_n_minibatches=1, prox="interpolate", mb_spec={"max_tokens_per_mb": 1})
    return _run(parallel, folder, actor, *random_batch(groups=1, sizes=(2,)))


def not_finite_on_one_rank(parallel, folder: Path):
    batch, rows = random_batch()
    bad = rows["0/0"]
    rows["0/0"] = replace(bad, returns=np.full(bad.length, np.nan, np.float32))
    return _run(parallel, folder, _actor(), batch, rows)


def rows_that_nobody_wrote(parallel, folder: Path):
    """Every other row is masked; with four ranks, some rank has only such rows."""
    batch, rows = random_batch(groups=2, sizes=(3, 3), seed=8)
    for key in [key for key in rows if int(key[-1]) % 2 == 0]:
        row = rows[key]
        nothing = np.zeros_like(row.loss_mask)
        rows[key] = replace(row, loss_mask=nothing, logprobs=row.logprobs * 0, versions=nothing - 1)
    return _run(parallel, folder, _actor(), batch_of(rows, batch.version), rows)


def packed_one_token_at_a_time(parallel, folder: Path):
    actor = _actor(mb_spec={"packing": "packed", "max_tokens_per_mb": 1})
    return _run(parallel, folder, actor, *random_batch(seed=9))


def recomputed_and_offloaded(parallel, folder: Path):
    return _run(parallel, folder, _actor(gradient_checkpointing=True), *random_batch(seed=2), offload=True)


def adapters(parallel, folder: Path):
    """Every rank draws the same A; the weights compared have the adapters added."""
    torch.manual_seed(5)
    actor = _actor(lora={"rank": 3, "alpha": 6}, mb_spec={"packing": "packed"}, optimizer={"lr": 1e-2})
    return _run(parallel, folder, actor, *random_batch(seed=4))


class MadeUpSeconds(Stopwatch):
    """Says how long the micro-batches of ``loads`` would take on a device that is slow at attention."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.loads = []

    def seconds(self):
        assert len(super().seconds()) == len(self.loads)
        return [2e-4 * load.tokens + 3e-5 * load.pairs + 1e-3 for load in self.loads]


def balanced_by_measured_seconds(parallel, folder: Path):
    actor = _actor(mb_spec={"packing": "packed", "max_tokens_per_mb": 25, "balance": "measured"})
    watch = MadeUpSeconds()
    stores = [random_batch(seed=seed) for seed in range(3)]
    rows = {f"{n}:{key}": row for n, (_, store) in enumerate(stores) for key, row in store.items()}
    engine = build_engine(folder, parallel, actor)
    update = PpoUpdate(engine, actor, lambda keys: [rows[key] for key in keys], watch=watch)
    for n, (batch, store) in enumerate(stores):
        batch = batch_of({f"{n}:{key}": row for key, row in store.items()}, batch.version)
        tags = batch.trajectories
        plan = plan_update(tags, actor, rank=parallel.rank, ranks=parallel.world_size, cost=update.cost)
        mine = [members for part in plan.minibatches for members in part.micro_batches]
        watch.loads = [load_of([tags[i].length for i in members], "packed") for members in mine]
        report = update.run(batch)
    return learned_by(engine), report.metrics


def replayed_processors(parallel, folder: Path):
    gconfig = GenerationHyperparameters(temperature=0.7, min_new_tokens=2)
    return _run(parallel, folder, _actor(), *random_batch(seed=3), gconfig=gconfig)


def critic_and_reference(parallel, folder: Path):
    """GAE with KL in the reward: values, whitening and penalties meet over ranks. The critic's weights count too."""
    actor = _actor(advantage="gae", gae_lambda=0.9, discount=0.97, shaping={"overlong_margin": 2, "length_limit": 6})
    ref = ReferenceConfig(kl_coef=0.1, kl_in="reward", kl_estimator="k1")
    critic = build_critic(folder, parallel, actor, value_clip=0.05)
    companions = Companions(critic=critic, reference=build_reference(folder, parallel, actor), ref=ref)
    return _helped(parallel, folder, actor, companions, random_batch(seed=2))


def adapters_with_critic_and_reference(parallel, folder: Path):
    """Adapters alone of the policy, all of the critic; the reference is what the adapters are added to."""
    torch.manual_seed(6)
    actor = _actor(advantage="gae", gae_lambda=0.9, lora={"rank": 3, "alpha": 6}, optimizer={"lr": 1e-2})
    model = exact_norms(load_language_model(folder, dtype=torch.float64)).to(parallel.device)
    reference = Reference(PolicyModel(model, replayed_sampling(GenerationHyperparameters(), model)), parallel)
    companions = Companions(
        critic=build_critic(folder, parallel, actor, value_clip=0.05),
        reference=reference,
        ref=ReferenceConfig(kl_coef=0.1, kl_estimator="k3"),
    )
    return _helped(parallel, folder, actor, companions, random_batch(seed=10))


def bounded_by_second_moment(parallel, folder: Path):
    """M2PO's bound comes from the tokens of all ranks; KL of groups in the loss."""
    actor = _actor(objective="m2po", m2_limit=0.02, entropy_coef=0.01, shaping={"overlong_filter": True})
    companions = Companions(
        reference=build_reference(folder, parallel, actor), ref=ReferenceConfig(kl_coef=0.05), max_new_tokens=9
    )
    return _helped(parallel, folder, actor, companions, random_batch(seed=6))


def kl_off_a_groups_rewards(parallel, folder: Path):
    actor = _actor(advantage="rloo", mb_spec={"packing": "packed"})
    ref = ReferenceConfig(kl_coef=0.1, kl_in="reward", kl_estimator="k1")
    companions = Companions(reference=build_reference(folder, parallel, actor), ref=ref)
    return _helped(parallel, folder, actor, companions, random_batch(seed=7))


def supervised(parallel, folder: Path):
    actor = _actor(mb_spec={"packing": "packed", "max_tokens_per_mb": 25})
    engine = build_engine(folder, parallel, actor)
    rows = [supervised_row(r.token_ids.tolist(), r.loss_mask.tolist()) for r in random_batch()[1].values()]
    reports = [SftUpdate(engine, actor.mb_spec).run(rows) for _ in range(2)]
    return weights_of(engine), {"loss": reports[-1].loss, "train/skipped_minibatches": 0}


def _helped(parallel, folder: Path, actor: ActorConfig, companions: Companions, data):
    engine = build_engine(folder, parallel, actor)
    report = run_update(engine, actor, *data, companions)
    weights = learned_by(engine)
    if companions.critic is not None:
        weights |= {f"critic.{name}": value for name, value in learned_by(companions.critic.engine).items()}
    return weights, report.metrics


def single_precision(parallel, folder: Path):
    return _run(parallel, folder, _actor(), *random_batch(), dtype=torch.float32)


#: run on one rank in the test's process and on several in others; all but the last are in float64
SCENARIOS = {
    f.__name__: f
    for f in (
        uneven_rows,
        packed_micro_batches,
        a_rank_without_rows,
        no_rank_has_more_than_one_row,
        not_finite_on_one_rank,
        rows_that_nobody_wrote,
        packed_one_token_at_a_time,
        adapters,
        balanced_by_measured_seconds,
        recomputed_and_offloaded,
        replayed_processors,
        critic_and_reference,
        adapters_with_critic_and_reference,
        bounded_by_second_moment,
        kl_off_a_groups_rewards,
        supervised,
        single_precision,
    )
}

KINDS = ("untied", "tied")


def cases(ranks: int) -> list[tuple[str, str]]:
    """(kind, scenario): all with two ranks, those that differ by the number of ranks with more."""
    every = [("tied", name) for name in SCENARIOS] + [("untied", f.__name__) for f in (uneven_rows, single_precision)]
    few = (
        uneven_rows,
        packed_micro_batches,
        not_finite_on_one_rank,
        rows_that_nobody_wrote,
        recomputed_and_offloaded,
        adapters,
        balanced_by_measured_seconds,
    )
    return every if ranks == 2 else [("tied", f.__name__) for f in few]


def snapshot_written(parallel, folder: Path, root: Path):
    """Two updates; the state between them is written to ``root`` while the second runs. Weights after both."""
    engine = build_engine(folder, parallel, _actor())
    run_update(engine, _actor(), *random_batch(seed=1))
    store = SnapshotStore(root, {"policy": engine}, parallel)
    store.save(1)
    run_update(engine, _actor(), *random_batch(seed=2))
    store.finish()
    return weights_of(engine)


def snapshot_read(parallel, folder: Path, root: Path):
    """The second of those updates, by a fresh engine that reads the first from ``root``."""
    engine = build_engine(folder, parallel, _actor())
    store = SnapshotStore(root, {"policy": engine}, parallel)
    assert store.load(store.latest()) == 1
    run_update(engine, _actor(), *random_batch(seed=2))
    return weights_of(engine)
