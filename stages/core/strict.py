"""Base of everything that a recipe may say, or that processes leave for each other in files."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Immutable pydantic model that refuses unknown fields."""

    # A diverged loss is NaN, and must come back as such from `result.json`.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")
