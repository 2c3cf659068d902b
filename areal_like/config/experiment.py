"""The experiment file's root: every section, and the rules that cross sections."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from areal_like.api.generation import GenerationHyperparameters
from areal_like.config.actor import ActorConfig
from areal_like.config.critic import CriticConfig
from areal_like.config.dataset import TrainDatasetConfig, ValidDatasetConfig
from areal_like.config.learning import check_learning
from areal_like.config.model import ModelConfig
from areal_like.config.reference import ReferenceConfig
from areal_like.config.rewards import RewardsConfig
from areal_like.config.rollout import RolloutConfig
from areal_like.config.schedule import EvaluatorConfig, RecoverConfig, SaverConfig
from areal_like.config.section import Section
from areal_like.config.weights import WeightsConfig

#: sampling parameters that change the distribution in a way the trainer does not replay
_UNTRAINABLE = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "frequency_penalty": 0.0, "greedy": False}


#: names become folders (255 bytes on most disks), with room for what is put around them
_LONGEST_NAME = 200

#: a flag's value: true is the bare flag, false its ``--no-`` form, null leaves it out, a mapping becomes JSON
EngineFlag = bool | int | float | str | list[Any] | dict[str, Any] | None


class ExperimentConfig(Section):
    experiment_name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=_LONGEST_NAME)
    trial_name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=_LONGEST_NAME)
    seed: int = Field(1, ge=0, le=2**63 - 1)
    total_train_steps: int = Field(ge=1)
    runs_dir: str = Field("runs", pattern=r"^[^\x00]*$", description="folder that holds <experiment_name>/<trial_name>")
    model: ModelConfig
    train_dataset: TrainDatasetConfig
    valid_dataset: ValidDatasetConfig | None = None
    workflow: str = Field(description="dotted path of a RolloutWorkflow class")
    workflow_args: dict[str, Any] = Field(default_factory=dict, description="passed to the workflow's __init__")
    reward_fn: str | None = Field(None, description="dotted path of the reward function")
    gconfig: GenerationHyperparameters = Field(default_factory=GenerationHyperparameters)
    eval_gconfig: GenerationHyperparameters | None = Field(None, description="for evaluation; default: gconfig")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    vllm: dict[str, EngineFlag] = Field(default_factory=dict, description="flags of vLLM's server, passed on untouched")
    sglang: dict[str, EngineFlag] = Field(default_factory=dict, description="flags of SGLang's server, likewise")
    rewards: RewardsConfig = Field(default_factory=RewardsConfig)
    actor: ActorConfig = Field(default_factory=ActorConfig)
    critic: CriticConfig | None = Field(None, description="a value model, for actor.advantage: gae")
    ref: ReferenceConfig | None = Field(None, description="a frozen model that the policy is held to")
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    evaluator: EvaluatorConfig = Field(default_factory=EvaluatorConfig)
    saver: SaverConfig = Field(default_factory=SaverConfig)
    recover: RecoverConfig = Field(default_factory=RecoverConfig)

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        size, parts = self.train_dataset.batch_size, self.actor.ppo_n_minibatches
        if size % parts:
            raise ValueError(
                f"train_dataset.batch_size ({size}) must be a multiple of actor.ppo_n_minibatches ({parts}): "
                f"every minibatch takes whole groups; use a batch_size such as {max(parts, size - size % parts)}"
            )
        return self

    @model_validator(mode="after")
    def _learning_fits(self) -> Self:
        check_learning(self.actor, self.critic, self.gconfig)
        return self

    @model_validator(mode="after")
    def _training_replays_sampling(self) -> Self:
        changed = [k for k, off in _UNTRAINABLE.items() if getattr(self.gconfig, k) != off]
        if self.gconfig.temperature == 0.0:
            changed.append("temperature")
        if changed:
            raise ValueError(
                f"gconfig.{changed[0]}: training needs the log-probs of the distribution sampled from, and the trainer "
                f"replays only temperature > 0 and min_new_tokens; remove it, or set it in eval_gconfig"
            )
        return self

    @model_validator(mode="after")
    def _servers_add_adapters(self) -> Self:
        if self.actor.lora is not None and self.rollout.spec.name != "embedded":
            raise ValueError(
                f"actor.lora publishes adapters alone, which only embedded servers add to their weights; "
                f"rollout.backend is {self.rollout.backend}; use embedded or remove actor.lora"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_differ(self) -> Self:
        if self.rollout.drop_equal_rewards and self.gconfig.n_samples == 1:
            raise ValueError(
                "rollout.drop_equal_rewards needs gconfig.n_samples of at least 2: the rewards of a group of one are "
                "always equal, so every group would be filtered"
            )
        return self

    @model_validator(mode="after")
    def _flags_belong_to_the_engine(self) -> Self:
        for name in ("vllm", "sglang"):
            if getattr(self, name) and self.rollout.spec.name != name:
                raise ValueError(f"{name}: has flags, and rollout.backend is {self.rollout.backend!r}; remove one")
        return self

    @model_validator(mode="after")
    def _flags_are_for_servers_of_ours(self) -> Self:
        if self.rollout.servers and self.engine_flags:
            name = self.rollout.spec.name
            keys = ", ".join(f"{name}.{key}" for key in self.engine_flags)
            raise ValueError(
                f"{keys}: flags that the run gives to servers which it starts, and rollout.servers names servers that "
                f"somebody else started, with flags of theirs; start those with them, and remove them here (on the "
                f"command line: {name}={{}})"
            )
        return self

    @property
    def engine_flags(self) -> dict[str, EngineFlag]:
        """The flags of the engine that the run uses; the embedded one has none."""
        return {"vllm": self.vllm, "sglang": self.sglang}.get(self.rollout.spec.name, {})

    @property
    def evaluation_gconfig(self) -> GenerationHyperparameters:
        return self.eval_gconfig or self.gconfig
