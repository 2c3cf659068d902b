"""The critic: a value model beside the policy, on the same ranks, with its own optimiser.

Legend: ``_T`` written target tokens of a micro-batch; ``_D`` hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification

from areal_like.algo.aggregation import aggregate
from areal_like.algo.packing import Layout
from areal_like.algo.value import value_loss
from areal_like.config.critic import CriticConfig
from areal_like.errors import ConfigError
from areal_like.train.attention import ATTENTION_NAME, register_varlen_attention
from areal_like.train.batching import MicroBatch, TrainRow
from areal_like.train.checkpoint import write_checkpoint
from areal_like.train.engine import TrainEngine
from areal_like.train.figures import OptimiserFigures, TokenMeans
from areal_like.train.model import PolicyModel, Sampling, prepare_for_training
from areal_like.train.parallel import Parallel
from areal_like.train.plan import MinibatchPlan
from areal_like.train.rows import BatchRows

#: lays rows out for a forward pass
Build = Callable[[Sequence[TrainRow]], MicroBatch]


def load_value_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    layout: Layout = "padded",
    gradient_checkpointing: bool = False,
    compiled: bool = False,
) -> nn.Module:
    """A Hugging Face model with one number per token, from a causal language model or from a saved critic.

    A new head starts at 0, so that a first update's values say nothing rather than something random.

    Raises:
        ConfigError: the folder holds no model that can have such a head.
    """
    register_varlen_attention()
    try:
        model, info = AutoModelForTokenClassification.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME if layout == "packed" else attention,
            num_labels=1,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"critic.path: {path} holds no model that can be given a value head: {error}") from error
    head = _value_head(model)
    if any(name.startswith(head_name(model)) for name in info["missing_keys"]):
        with torch.no_grad():
            head.weight.zero_()
            if head.bias is not None:
                head.bias.zero_()
    model.config.architectures = [type(model).__name__]
    assert isinstance(model, nn.Module)
    prepare_for_training(model, gradient_checkpointing=gradient_checkpointing, compiled=compiled)
    return model


def head_name(model: nn.Module) -> str:
    """Attribute of the one-output layer: ``score`` or ``classifier``, as the model's family calls it."""
    return "score" if hasattr(model, "score") else "classifier"


def _value_head(model: nn.Module) -> Any:
    return getattr(model, head_name(model))


class ValueModel(PolicyModel):
    """Answers as a policy does, so that one engine trains both: a value for every written token, and no entropy."""

    def __init__(self, value_model: nn.Module) -> None:
        super().__init__(value_model, Sampling())

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """V of the state in which each token was written, [T], in at least float32; and zeros."""
        # the sum over one output is a copy, where squeezing would be a view, which FSDP warns of
        value_T = _value_head(self.language_model)(self._hidden(batch)).sum(-1)
        value_T = value_T if value_T.dtype == torch.float64 else value_T.float()
        return value_T, torch.zeros_like(value_T)


class Critic:
    """Values before an update, one optimiser step a minibatch in it. Every method is collective."""

    def __init__(self, engine: TrainEngine, config: CriticConfig, model_config: Any) -> None:
        """``engine``: over a :class:`ValueModel`; ``model_config``: its transformers config."""
        self._engine = engine
        self._model_config = model_config
        self._config = config
        self._figures = OptimiserFigures()
        self._means = TokenMeans()

    @property
    def engine(self) -> TrainEngine:
        """For checkpoints: its weights and optimiser."""
        return self._engine

    def values(self, batch: MicroBatch) -> Tensor:
        """V [T] under the weights as they are, without gradient."""
        return self._engine.logprobs_without_gradient(batch)

    def end_of_pass(self) -> None:
        self._engine.end_of_pass()

    def learn(self, plan: MinibatchPlan, rows: BatchRows, build: Build) -> None:
        """One optimiser step towards the column ``return``, from the values in ``value``."""
        total = torch.zeros((), dtype=torch.float64, device=self._engine.parallel.device)
        for number, members in enumerate(plan.micro_batches, start=1):
            batch = build(rows.of(members))
            value_T, _ = self._engine.logprobs(batch)
            old_T, return_T = (rows.column(name, members, value_T) for name in ("value", "return"))
            assert old_T is not None and return_T is not None
            mask_T = torch.ones_like(batch.target_T, dtype=torch.bool)
            return_T = return_T.to(value_T.dtype)
            found = value_loss(value_T, old_T, return_T, mask_T, clip=self._config.value_clip)
            share = aggregate(
                found.loss_T, mask_T, batch.row_T, batch.rows, mode="token_mean", denominator=float(plan.tokens)
            )
            self._engine.backward(share, last=number == len(plan.micro_batches))
            total += share.detach().double()
            self._means.add(clipped_fraction=found.clipped_T, **_explained(old_T, return_T))
        self._figures.losses.append(total)
        self._figures.outcomes.append(self._engine.step())

    def write(self, folder: Path, *, tensors: Iterable[tuple[str, Tensor]], source: Path) -> None:
        """Write ``tensors``, the engine's, as a Hugging Face checkpoint into ``folder``/critic."""
        write_checkpoint(folder / "critic", tensors, config=self._model_config, source=source)

    def report(self, parallel: Parallel) -> dict[str, float]:
        """Figures since the last report, keyed ``critic/name``; ``explained_variance`` is 1 − E[(R − V)²] / Var R."""
        figures, means = self._figures.reduced(parallel), self._means.reduced(parallel)
        self._figures, self._means = OptimiserFigures(), TokenMeans()
        if means:
            error = means.pop("squared_error")
            variance = means.pop("squared_return") - means["return_mean"] ** 2
            means["explained_variance"] = 1.0 - error / variance if variance > 1e-12 else 0.0
        return {f"critic/{name}": value for name, value in (figures | means).items()}


def _explained(old_T: Tensor, return_T: Tensor) -> dict[str, Tensor]:
    return {
        "value_mean": old_T,
        "return_mean": return_T,
        "squared_return": return_T.double().square(),
        "squared_error": (return_T.double() - old_T.double()).square(),
    }
