"""Recipe: YAML text and overrides → validated stages in topological order.

What the fields mean belongs to the stages' configs; what runs belongs to `plan.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.contract import StageConfig


@dataclass(frozen=True)
class Recipe:
    """One complete refresh. `stages` is in topological order; outside paths in it are absolute."""

    name: str
    folder: Path
    stages: dict[str, StageConfig]

    def upstream_of(self, stage: str) -> tuple[str, ...]:
        """Names of the stages that `stage` refers to itself, each once."""
        raise NotImplementedError

    def ancestors_of(self, stage: str) -> tuple[str, ...]:
        """Names of all stages that `stage` stands on, directly or not, in topological order."""
        raise NotImplementedError

    def dependents_of(self, stage: str) -> tuple[str, ...]:
        """Names of all stages that stand on `stage`, directly or not, in topological order."""
        raise NotImplementedError


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply overrides such as `stages.sft.learning_rate=1e-4`, validate.

    Raises `RecipeError` that lists every problem.
    """
    raise NotImplementedError


def json_schema() -> dict[str, Any]:
    """JSON schema of recipe files, for editors."""
    raise NotImplementedError
