"""What the parameters of a deployment may change in a recipe: what is learned, not whose program runs, or where.

They come through Prefect's API, from a form or a program; a recipe, and `lifecycle run --set`, come from somebody who
may run programs on this machine anyway. So a run of a deployment is held to its recipe in all that would start one, or
read other files than the recipe's own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flows.recipe.overrides import apply_overrides
from flows.recipe.text import absolute, read_tree
from flows.running.request import RefreshRequest
from stages.core.errors import RecipeError

OF_THE_RECIPE = frozenset({"environment", "launcher", "slurm", "kubernetes"})
"""Fields of `execution`."""
CODE_FIELDS = ("trust_remote_code",)
PYTHON_FILE = re.compile(r"\.py[cdiowx]?\b|\.so\b", re.IGNORECASE)


def check_parameters(request: RefreshRequest) -> None:
    """Raises `RecipeError` that names every override a deployment may not have, and what `read_tree` raises."""
    path = Path(request.recipe)
    before, after = read_tree(path), read_tree(path)
    if apply_overrides(after, request.overrides):
        return  # reading the recipe says what is wrong
    found = []
    for names, value in _changes(before, after):
        reason = _reason(names, value, path.absolute().parent)
        if reason:
            found.append(f"{'.'.join(names)}: {reason}")
    if found:
        remedy = "change the recipe, or run it on its machine with `lifecycle run --set`"
        raise RecipeError("\n  ".join([f"parameters of a deployment may not do this; {remedy}:", *found]))


def _changes(before: Any, after: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each field that differs, and its new value; None for one that is gone."""
    if isinstance(before, dict) or isinstance(after, dict):
        old, new = (tree if isinstance(tree, dict) else {} for tree in (before, after))
        for key in {**old, **new}:
            yield from _changes(old.get(key), new.get(key), (*names, str(key)))
    elif isinstance(after, list) and after != before:
        for position, value in enumerate(after):
            yield from _changes(None, value, (*names, str(position)))
    if not isinstance(after, dict | list) and after != before:
        yield names, after


def _reason(names: tuple[str, ...], value: Any, folder: Path) -> str | None:
    if names[2:3] == ("execution",) and OF_THE_RECIPE.intersection(names[3:4]):
        return "only the recipe says where a stage runs, and in which environment"
    if names[-1] in CODE_FIELDS:
        return "only the recipe says whose code is trusted"
    if not isinstance(value, str):
        return None
    if PYTHON_FILE.search(value):
        return "only the recipe names programs"
    return None if _is_inside(value, folder) else f"names a file outside the recipe's folder {folder}"


def _is_inside(text: str, folder: Path) -> bool:
    """Whether a text, taken for a path, stays in the folder; links are followed. Most texts are none, and do."""
    try:
        path = absolute(Path(text.removeprefix("file://")), folder)
        return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
    except (OSError, ValueError, RuntimeError):  # no path, or of a user that does not exist
        return False
