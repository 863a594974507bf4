"""Fields of a recipe that do nothing beside what its other fields say: a person who set one meant something else."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from typing import Any

from flows.recipe.recipe import Recipe
from flows.recipe.text import show
from stages.core.contract import StageConfig
from stages.core.errors import RecipeError

OFTEN_OVERRIDDEN = ("execution.", "epochs")
"""What somebody who tries a recipe for a few steps, or on one machine, need not take out of it."""


def check_idle(recipe: Recipe, chosen: Collection[str]) -> list[str]:
    """What these stages say without effect and may go on saying, a sentence each.

    Raises `RecipeError` that lists all else that has none.
    """
    found = [(name, *one) for name, config in recipe.stages.items() if name in chosen for one in _idle(config)]
    problems = [
        f"stages.{name}.{path}: {value} does nothing: {why}; remove it"
        for name, path, value, why in found
        if not path.startswith(OFTEN_OVERRIDDEN)
    ]
    if problems:
        raise RecipeError("\n".join(problems))
    return [f"{name}: `{path}: {value}` does nothing: {why}" for name, path, value, why in found]


def _idle(config: StageConfig) -> Iterator[tuple[str, str, str]]:
    """Path, value and reason of each idle field that is set; one that has its default counts as unset."""
    said = config.model_dump(mode="json", exclude_defaults=True)
    for path, why in dict(config.idle_fields()).items():
        *blocks, field = path.split(".")
        block: dict[str, Any] = functools.reduce(lambda tree, name: tree.get(name, {}), blocks, said)
        if field in block:
            yield path, show(block[field]), why
