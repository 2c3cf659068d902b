"""``train_dataset`` and ``valid_dataset``: JSONL files, one prompt a line."""

from __future__ import annotations

from pydantic import Field

from areal_like.config.section import Section


class TrainDatasetConfig(Section):
    path: str = Field(description="JSONL file; every line is the dict that arun_episode receives")
    batch_size: int = Field(ge=1, description="groups per training step (B)")
    shuffle: bool = Field(True, description="seeded shuffle, anew every epoch")


class ValidDatasetConfig(Section):
    path: str = Field(description="JSONL file with prompts kept out of training")
    max_prompts: int | None = Field(None, ge=1, description="evaluate the first so many only")
