"""Plan: recipe + outside inputs + store index → what runs, what is cached, and why. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from flows.outside import Outside
from flows.recipe import Recipe
from flows.record import Index
from flows.version import Difference, Identity
from stages.contract import StageConfig

Action = Literal["run", "cached"]


@dataclass(frozen=True)
class PlannedStage:
    """One stage of a plan. `upstream` are the stages it refers to, `ancestors` all that it stands on.

    A stage whose action is `run` may still be found cached when its turn comes: when its version exists and the
    artifacts that it stands on were rebuilt with the same content.
    """

    recipe: str
    name: str
    kind: str
    version: str
    resume_key: str
    identity: Identity
    config: StageConfig
    upstream: tuple[str, ...]
    ancestors: tuple[str, ...]
    action: Action
    reason: str
    differences: tuple[Difference, ...] = ()
    forced: bool = False


@dataclass(frozen=True)
class Plan:
    """The stages of a refresh, in topological order."""

    recipe: str
    stages: dict[str, PlannedStage]


def plan(
    recipe: Recipe, outside: Outside, index: Index, *, force: Collection[str] = (), until: str | None = None
) -> Plan:
    """Decide for every stage (with `until`: for that stage and its ancestors) whether it runs, and say why.

    Raises `RecipeError` when `force` or `until` names a stage that the recipe lacks.
    """
    raise NotImplementedError
