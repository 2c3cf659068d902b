"""Batches, reports and receipts with figures that are easy to follow."""

from __future__ import annotations

from areal_like.api.trajectory import Batch, GroupTag, PromptId, TrajectoryTag, UpdateReport
from areal_like.api.weights import CommitReceipt


def batch_of(version: int, groups: int = 1, rewards: tuple[float, ...] = (0.0, 1.0), lag: int = 0) -> Batch:
    """Groups of ``len(rewards)`` trajectories with 3 written tokens of 5; all begin ``lag`` versions back."""

    def group(number: int) -> GroupTag:
        name = f"v{version}-g{number}"
        trajectories = tuple(
            TrajectoryTag(
                key=f"{name}-s{i}",
                group_id=name,
                episode_id=f"{name}-s{i}",
                length=5,
                loss_tokens=3,
                reward=reward,
                oldest_version=version - lag,
                newest_version=version if i == 0 else version - lag,
            )
            for i, reward in enumerate(rewards)
        )
        prompt = PromptId(epoch=0, index=number)
        return GroupTag(group_id=name, prompt=prompt, attempt=0, stamp=version - lag, trajectories=trajectories)

    return Batch(version=version, groups=tuple(group(number) for number in range(groups)))


def report_of(version: int) -> UpdateReport:
    return UpdateReport(version=version, seconds=0.5, tokens=12, metrics={"train/loss": 0.25})


def receipt_of(version: int, server: str = "inference-0") -> CommitReceipt:
    return CommitReceipt(
        server=server,
        incarnation=0,
        version=version,
        digest="d",
        bytes=1000,
        seconds_staged=0.1,
        seconds_paused=0.25,
        interrupted_requests=3,
    )
