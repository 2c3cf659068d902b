"""Which keys exist, and which one a mistyped key was meant to be."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

#: below this similarity (difflib ratio) a suggestion confuses more than it helps
_SIMILAR = 0.6

#: what users of AReaL type, and what says the same here; None: there is no such thing, the text tells why
AREAL_KEYS: Mapping[str, tuple[str | None, str]] = types.MappingProxyType(
    {
        "actor.path": ("model.path", ""),
        "actor.dtype": ("model.dtype", ""),
        "actor.attn_impl": ("model.attn_implementation", ""),
        "actor.max_new_tokens": ("gconfig.max_new_tokens", ""),
        "actor.group_size": ("gconfig.n_samples", ""),
        "actor.temperature": ("gconfig.temperature", ""),
        "actor.use_decoupled_loss": ("actor.prox", "prox: recompute is decoupled, prox: behave is not"),
        "actor.recompute_logprob": ("actor.prox", "prox: recompute"),
        "actor.prox_logp_method": ("actor.prox", "recompute | interpolate | behave"),
        "actor.behave_imp_weight_cap": ("actor.behave_cap", ""),
        "actor.behave_imp_weight_mode": ("actor.behave_mode", "truncate | mask"),
        "actor.optimizer.warmup_steps_proportion": ("actor.optimizer.warmup_steps", "a number of optimiser steps"),
        "actor.optimizer.initial_loss_scale": (None, "bfloat16 and float32 need no loss scale"),
        "actor.optimizer.offload": (None, "the optimiser stays on the device"),
        "actor.kl_ctl": ("ref.kl_coef", ""),
        "actor.kl_estimator": ("ref.kl_estimator", ""),
        "actor.reward_scaling": ("actor.shaping.scaling", ""),
        "actor.reward_bias": ("actor.shaping.bias", ""),
        "actor.reward_clip": ("actor.shaping.clip", ""),
        "actor.overlong_reward_penalty": ("actor.shaping.overlong_margin", "null switches it off"),
        "actor.overlong_tokens": ("actor.shaping.overlong_margin", ""),
        "actor.overlong_penalty_factor": ("actor.shaping.overlong_penalty", ""),
        "actor.mask_no_eos_with_zero": ("actor.shaping.overlong_filter", ""),
        "actor.m2_threshold": ("actor.m2_limit", "with objective: m2po"),
        "actor.importance_sampling_level": ("actor.objective", "gspo has its ratio at the level of the sequence"),
        "actor.use_sapo_loss": ("actor.objective", "sapo"),
        "actor.sapo_tau_pos": ("actor.tau_positive", ""),
        "actor.sapo_tau_neg": ("actor.tau_negative", ""),
        "actor.reward_norm": ("actor.adv_norm", "advantages are normalised over a group's episode rewards"),
        "actor.mb_spec.n_mbs": ("actor.mb_spec.max_tokens_per_mb", "micro-batches follow from the token budget"),
        "actor.group_reward_norm": ("actor.adv_norm", ""),
        "actor.experiment_name": ("experiment_name", ""),
        "actor.trial_name": ("trial_name", ""),
        "rollout.queue_size": ("rollout.max_concurrent_rollouts", "capacity follows from the staleness bound"),
        "rollout.consumer_batch_size": ("train_dataset.batch_size", ""),
        "rollout.experiment_name": ("experiment_name", ""),
        "rollout.trial_name": ("trial_name", ""),
        "rollout.enable_rollout_tracing": (None, "every run writes a trace"),
        "rollout.setup_timeout": ("rollout.start_timeout", ""),
        "rollout.schedule_policy": (None, "requests go to the server with the fewest in flight, with affinity"),
        "rollout.max_workflow_failures": ("rollout.breaker_failures", ""),
        "train_dataset.type": (None, "rows go to the workflow as they are: JSONL, one prompt a line"),
        "train_dataset.max_length": ("gconfig.max_tokens", ""),
        "train_dataset.num_workers": (None, "prompts are read by the controller"),
        "valid_dataset.batch_size": ("evaluator.max_concurrent", ""),
        "valid_dataset.type": (None, "rows go to the workflow as they are: JSONL, one prompt a line"),
        "total_train_epochs": ("total_train_steps", "steps = epochs x prompts / train_dataset.batch_size"),
        "total_train_n_seqs": ("total_train_steps", ""),
        "tokenizer_path": ("model.path", "the tokenizer lies beside the model"),
        "async_training": ("rollout.max_head_offpolicyness", "0 is synchronous"),
        "allocation_mode": ("rollout.backend", "and actor.backend, as in embedded:d1 and fsdp:d1"),
        "critic.value_eps_clip": ("critic.value_clip", ""),
        "critic.backend": ("actor.backend", "the critic lives on the actor's ranks"),
        "ref.backend": ("actor.backend", "the reference lives on the actor's ranks"),
        "stats_logger": (None, "every run writes metrics.jsonl and summary.json"),
        "cluster.fileroot": ("runs_dir", ""),
        "cluster": ("runs_dir", "for fileroot; this launch uses one host"),
        "launcher": (None, "`areal-like run` starts every process on this host"),
        "saver.freq_epochs": ("saver.freq_steps", ""),
        "saver.freq_secs": ("saver.freq_steps", ""),
        "evaluator.freq_epochs": ("evaluator.freq_steps", ""),
        "evaluator.freq_secs": ("evaluator.freq_steps", ""),
        "recover.freq_steps": (None, "recovery is not built yet; recover.mode is disabled"),
        "recover.freq_epochs": (None, "recovery is not built yet; recover.mode is disabled"),
        "recover.freq_secs": (None, "recovery is not built yet; recover.mode is disabled"),
        "recover.retries": (None, "recovery is not built yet; recover.mode is disabled"),
        "checkpointer": ("saver", ""),
        "rollout.max_lag": ("rollout.max_head_offpolicyness", ""),
        "rollout.eta": ("rollout.max_head_offpolicyness", ""),
    }
)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class inside ``annotation`` (``Section``, ``Section | None``), or None where it is a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        for option in get_args(annotation):
            found = section_of(option)
            if found is not None:
                return found
    return None


def key_paths(root: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted path of the experiment file, sections included."""
    for name, info in root.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        section = section_of(info.annotation)
        if section is not None:
            yield from key_paths(section, f"{path}.")


def annotation_at(root: type[BaseModel], path: str) -> Any:
    """The type of the value at ``path``, or None where no such key exists."""
    section: type[BaseModel] | None = root
    annotation: Any = None
    for name in path.split("."):
        if section is None or name not in section.model_fields:
            return None
        annotation = section.model_fields[name].annotation
        section = section_of(annotation)
    return annotation


def explain_unknown(root: type[BaseModel], path: str) -> str:
    """One sentence about a key that does not exist: what it is called here, or the nearest key."""
    if path in AREAL_KEYS:
        ours, why = AREAL_KEYS[path]
        if ours is None:
            return f"unknown key: {why}"
        return f"unknown key; here it is {ours}" + (f" ({why})" if why else "")
    nearest = nearest_key(root, path)
    if nearest is not None:
        return f"unknown key; did you mean {nearest}?"
    parent = path.rpartition(".")[0]
    section = section_of(annotation_at(root, parent)) if parent else root
    known = ", ".join(section.model_fields) if section is not None else ""
    where = parent or "the top level"
    return f"unknown key; {where} has {known}" if known else f"unknown key; {where} has no keys of its own"


def nearest_key(root: type[BaseModel], path: str) -> str | None:
    """The existing key that ``path`` was most likely meant to be, or None.

    The same name deeper in the section comes first (``actor.lr``: ``actor.optimizer.lr``), then a sibling spelled
    alike, then the same name anywhere else in the file, then the likest full path.
    """
    parent, _, name = path.rpartition(".")
    known = list(key_paths(root))
    within = [p for p in known if parent and p.startswith(f"{parent}.") and p.rpartition(".")[2] == name]
    if within:
        return min(within, key=lambda p: (p.count("."), p))
    siblings = {p.rpartition(".")[2]: p for p in known if p.rpartition(".")[0] == parent}
    folded = {s.lower().replace("-", "_"): p for s, p in siblings.items()}
    wanted = name.lower().replace("-", "_")
    alike = difflib.get_close_matches(wanted, list(folded), n=1, cutoff=_SIMILAR)
    if alike:
        return folded[alike[0]]
    same_name = [p for p in known if p.rpartition(".")[2] == wanted]
    if same_name:
        return min(same_name, key=lambda p: (p.count("."), p))
    others = [p for p in known if not path.startswith(f"{p}.")]
    likest = difflib.get_close_matches(path, others, n=1, cutoff=_SIMILAR)
    return likest[0] if likest else None
