"""Base of every section of the experiment file: frozen, and a key it does not know is an error."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen; unknown keys are refused, and the loader names the nearest key that exists."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
