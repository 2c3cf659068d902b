"""The whole algorithm in one file, one process, no framework: generate, score, advantages, prox, loss, step, again.

On-ramp, synchronous baseline of the asynchronous system, and its numerical oracle:

    python benchmarks/sync_baseline.py --config configs/guess_cpu.yaml [--model DIR] [--data FILE] [--steps N]
    python benchmarks/sync_baseline.py --replay runs/guess/cpu

The first trains. The second trains on the batches that a run recorded (``rollout.record_batches: true``), in order, and
compares the final weights with the run's last checkpoint: equal to the bit if it ran on one CPU rank with padded rows.

Legend: ``_B`` rows, ``_L`` positions, ``_T`` written tokens in order, ``_V`` vocabulary.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lockstep import Episodes, core_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_like.algo.advantages import reward_scale, reward_table, token_advantages
from areal_like.algo.aggregation import aggregate, local_denominator
from areal_like.algo.logprobs import StopBan, chunked_logprobs, stop_ban_positions
from areal_like.algo.objectives import get_objective
from areal_like.algo.packing import cut_minibatches
from areal_like.algo.prox import ProxInputs, proximal_logprobs
from areal_like.algo.schedule import LearningRate
from areal_like.algo.settings import objective_settings
from areal_like.algo.terms import PolicyTerms
from areal_like.api import ModelRequest, ModelResponse, StopReason, Trajectory
from areal_like.api.batch_file import read_batch, recorded_batches
from areal_like.config.experiment import ExperimentConfig
from areal_like.config.load import load_config
from areal_like.config.paths import RunPaths

PARAMETER_TOLERANCE = 1e-6  # float32: order of sums is all that may differ between a run and its replay


class Policy:
    """A Hugging Face model that writes answers and learns from them."""

    def __init__(self, config: ExperimentConfig) -> None:
        torch.manual_seed(core_of(config).seed)
        torch.set_num_threads(config.actor.threads)
        path, kernel = config.model.path, config.model.attn_implementation
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=kernel)
        self.actor, self.gconfig, o = config.actor, config.gconfig, config.actor.optimizer
        eos = None if self.gconfig.ignore_eos else self.model.generation_config.eos_token_id
        self.stop_ids = sorted({*self.gconfig.stop_token_ids, *([eos] if isinstance(eos, int) else eos or ())})
        parameters, betas = self.model.parameters(), (o.beta1, o.beta2)
        self.adamw = torch.optim.AdamW(parameters, betas=betas, eps=o.eps, weight_decay=o.weight_decay, fused=True)
        steps, kind = config.total_train_steps * self.actor.ppo_n_minibatches, o.lr_scheduler_type
        shape = {"warmup_steps": o.warmup_steps, "total_steps": steps, "min_ratio": o.min_lr_ratio}
        self.rate = LearningRate(peak=o.lr, kind=kind, **shape)
        self.optimizer_steps = self.version = 0

    @torch.no_grad()
    def generate(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Answer as one batch, padded on the left; log-probs are of the distribution sampled from."""
        width = max(len(r.input_ids) for r in requests)
        ids_BL = torch.tensor([[0] * (width - len(r.input_ids)) + list(r.input_ids) for r in requests])
        attend_BL = torch.tensor([[0] * (width - len(r.input_ids)) + [1] * len(r.input_ids) for r in requests])
        answers: list[list[tuple[int, float]]] = [[] for _ in requests]
        running, cache = set(range(len(requests))), None
        while running:
            place_BL = (attend_BL.cumsum(1) - 1).clamp(min=0)[:, -ids_BL.shape[1] :]
            out = self.model(ids_BL, attend_BL, position_ids=place_BL, past_key_values=cache, use_cache=True)
            cache, logits_BV = out.past_key_values, out.logits[:, -1].float()
            young = [i for i in running if len(answers[i]) < requests[i].gconfig.min_new_tokens]
            logits_BV[torch.tensor(young, dtype=torch.int64)[:, None], self.stop_ids] = -torch.inf
            logp_BV = torch.log_softmax(logits_BV / self.gconfig.temperature, -1)
            ids_BL = torch.multinomial(logp_BV.exp(), 1)
            attend_BL = torch.cat([attend_BL, torch.ones_like(ids_BL)], 1)
            for i in tuple(running):
                answers[i].append((int(ids_BL[i]), float(logp_BV[i, ids_BL[i]])))
                if answers[i][-1][0] in self.stop_ids or len(answers[i]) == requests[i].gconfig.max_new_tokens:
                    running.remove(i)
        return [
            ModelResponse(
                input_tokens=list(request.input_ids),
                output_tokens=[token for token, _ in answer],
                output_logprobs=[logp for _, logp in answer],
                output_versions=[self.version] * len(answer),
                stop_reason=StopReason.STOP if answer[-1][0] in self.stop_ids else StopReason.LENGTH,
            )
            for request, answer in zip(requests, answers, strict=True)
        ]

    def logprobs(self, rows: Sequence[Trajectory]) -> torch.Tensor:
        """Log-probs [T] of the written tokens of ``rows`` under the current weights."""
        last = [int(np.flatnonzero(row.loss_mask)[-1]) for row in rows]  # a target only: the model need not read it
        space = [(0, max(last) - n) for n in last]
        ids = [np.pad(row.token_ids[:n], pad) for row, n, pad in zip(rows, last, space, strict=True)]
        mask = [np.pad(row.loss_mask[1 : n + 1], pad) for row, n, pad in zip(rows, last, space, strict=True)]
        ids_BL, mask_BL = torch.tensor(np.stack(ids)).long(), torch.tensor(np.stack(mask)) == 1  # predicts a target
        row_BL = torch.arange(len(rows))[:, None].expand_as(mask_BL)
        young_N = stop_ban_positions(mask_BL.flatten(), row_BL.flatten(), self.gconfig.min_new_tokens)
        ban = StopBan(ids_K=torch.tensor(self.stop_ids, dtype=torch.int64), active_T=young_N[mask_BL.flatten()])
        hidden_ND = self.model.base_model(input_ids=ids_BL, use_cache=False).last_hidden_state.flatten(0, 1)
        hidden_TD = hidden_ND.index_select(0, mask_BL.flatten().nonzero().squeeze(1))
        target_T = torch.tensor(np.concatenate([row.token_ids[row.loss_mask == 1] for row in rows])).long()
        head, temperature = self.model.get_output_embeddings(), self.gconfig.temperature
        return chunked_logprobs(hidden_TD, head.weight, target_T, temperature=temperature, ban=ban).logprob_T

    def update(self, rows: Sequence[Trajectory]) -> None:
        """One step of the loop: the groups of one batch make one new version."""
        actor, groups = self.actor, [row.group_id for row in rows]
        row_T = torch.repeat_interleave(torch.tensor([int(row.loss_mask.sum()) for row in rows]))
        behave_T = torch.tensor(np.concatenate([row.logprobs[row.loss_mask == 1] for row in rows]))
        version_T = torch.tensor(np.concatenate([row.versions[row.loss_mask == 1] for row in rows]))
        gains = [np.full(row.length, row.reward) if row.returns is None else row.returns for row in rows]
        return_T = torch.tensor(np.concatenate([g[row.loss_mask == 1] for g, row in zip(gains, rows, strict=True)]))
        table = reward_table([row.reward for row in rows], groups, [row.episode_id for row in rows])
        scale = reward_scale(table, actor.normalisation)
        advantage_T = token_advantages(scale, return_T.double(), row_T).float()
        with torch.no_grad():  # under the weights before the first optimiser step, and constant afterwards
            recomputed_T = self.logprobs(rows) if actor.prox == "recompute" else behave_T
        minibatches = cut_minibatches(groups, actor.ppo_n_minibatches)
        for done, members in enumerate(minibatches):
            chosen = torch.isin(row_T, torch.tensor(members))
            common = {"theta_T": self.logprobs([rows[i] for i in members]), "behave_T": behave_T[chosen]}
            mask_T, progress = torch.ones(int(chosen.sum()), dtype=torch.bool), done / len(minibatches)
            times = {"version_T": version_T[chosen], "version": self.version, "progress": progress}
            inputs = ProxInputs(recomputed_T=recomputed_T[chosen], mask_T=mask_T, **times, **common)
            prox_T, gain_T = proximal_logprobs(actor.prox, inputs), advantage_T[chosen]
            at_T, rest = torch.searchsorted(torch.tensor(members), row_T[chosen]), {"mask_T": mask_T, **common}
            terms = PolicyTerms(prox_T=prox_T, advantage_T=gain_T, row_T=at_T, rows=len(members), **rest)
            self.step(terms, get_objective(actor.objective)(terms, objective_settings(actor)).loss_T)
        self.version += 1

    def step(self, terms: PolicyTerms, loss_T: torch.Tensor) -> None:
        """One optimiser step on one minibatch; skipped if its gradient is not finite."""
        mode, where = self.actor.aggregation, (terms.mask_T, terms.row_T, terms.rows)
        denominator, constant = local_denominator(mode, *where), self.actor.aggregation_constant
        aggregate(loss_T, *where, mode=mode, denominator=denominator, constant=constant).backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).double().square().sum().sqrt()
        if torch.isfinite(norm):
            if norm > self.actor.optimizer.gradient_clipping:
                torch._foreach_mul_(gradients, float(self.actor.optimizer.gradient_clipping / (norm + 1e-6)))
            self.adamw.param_groups[0]["lr"] = self.rate.at(self.optimizer_steps)
            self.adamw.step()
            self.optimizer_steps += 1
        self.adamw.zero_grad()


def train(config: ExperimentConfig) -> Policy:
    """``total_train_steps`` steps, each on fresh episodes of the current weights."""
    policy = Policy(config)
    episodes, started = Episodes(config, policy.generate), time.perf_counter()
    for step in range(1, config.total_train_steps + 1):
        rows = episodes.next_batch()
        policy.update(rows)
        reward = sum(row.reward for row in rows) / len(rows)
        print(f"step {step:4d}  reward {reward:.3f}  {time.perf_counter() - started:7.1f} s", flush=True)
    return policy


def replay(run_dir: Path) -> float:
    """Largest difference of any parameter between the run's last checkpoint and a replay of its batches."""
    policy = Policy(load_config(run_dir / "config.yaml"))
    for path in recorded_batches(run_dir):
        version, rows = read_batch(path)
        if version != policy.version:
            raise SystemExit(f"{path}: holds the batch of version {version}, but that of {policy.version} is missing")
        policy.update(rows)
    folder = RunPaths(root=run_dir).checkpoint(policy.version)
    theirs = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    ours = {name: parameter.detach() for name, parameter in policy.model.named_parameters()}
    largest = max(float((theirs[name] - tensor).abs().max()) for name, tensor in ours.items())
    print(f"{policy.version} steps replayed; largest difference of a parameter {largest:.2e}")
    return largest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/guess_cpu.yaml", help="experiment file")
    parser.add_argument("--model", help="Hugging Face folder, instead of model.path")
    parser.add_argument("--data", help="JSONL file, instead of train_dataset.path")
    parser.add_argument("--steps", type=int, help="instead of total_train_steps")
    parser.add_argument("--replay", type=Path, help="folder of a run that recorded its batches")
    parser.add_argument("overrides", nargs="*", help="dotted overrides, such as actor.optimizer.lr=1e-4")
    given = parser.parse_args()
    if given.replay:
        return int(replay(given.replay) > PARAMETER_TOLERANCE)
    short = {"model.path": given.model, "train_dataset.path": given.data, "total_train_steps": given.steps}
    overrides = [f"{key}={value}" for key, value in short.items() if value is not None]
    train(load_config(given.config, [*overrides, *given.overrides]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
