"""Limits on Prefect deployment parameters: they may override training settings, but not name programs or other files.

Parameters come through Prefect's API; a recipe and `lifecycle run --set` come from someone who may run programs on this
machine anyway. So a deployment's run must keep its recipe's values wherever they would start a program, or read other
files than the recipe's own.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from flows.ledger.refreshes import was_run_here
from flows.recipe.overrides import apply_overrides
from flows.recipe.text import absolute, read_tree
from flows.running.request import RefreshRequest
from stages.core.errors import RecipeError
from stages.core.fields import OutsideInput, SourceText, find_marker
from stages.core.launchers.registry import BLOCKS
from stages.core.redaction import shortened
from stages.kinds.publish.config import PublishConfig
from stages.kinds.registry import KINDS

OF_THE_RECIPE = frozenset({"environment", "launcher", *BLOCKS})
"""Fields of a stage's `execution` that only the recipe may set; Prefect deployment parameters may not."""
CODE_FIELDS = frozenset({"trust_remote_code", "trust_task_code"})
SERVER_FIELDS = frozenset({"url", "key_variable"})
PYTHON_FILE = re.compile(r"\.py[cdiowx]?\b|\.so\b", re.IGNORECASE)  # also .pyc, .pyd, .pyi, .pyo, .pyw, .pyx


def check_recipe(recipe: str, deployment: str, registered: str | None) -> None:
    """Raise RecipeError unless the Prefect deployment of this name may run the recipe.

    registered: the recipe that it was made for; None for refreshes by hand, which must have been run in this home.
    """
    path = Path(recipe).absolute()
    if path == Path(registered).absolute() if registered is not None else was_run_here(path):
        return
    allowed = f"runs {registered} alone" if registered is not None else "runs recipes that were run in this home"
    remedy = "give that one to `lifecycle schedule`, or run it on its machine with `lifecycle run`"
    raise RecipeError(f"the deployment `{deployment}` {allowed}, found {shortened(recipe, 200)}; {remedy}")


def check_parameters(request: RefreshRequest) -> None:
    """Raise RecipeError that names all forbidden overrides in a deployment's parameters, or what `read_tree` raises."""
    path = Path(request.recipe)
    before, after = read_tree(path), read_tree(path)
    if apply_overrides(after, request.overrides):
        return  # the reader of the recipe reports the problem
    problems = []
    for names, value in _changes(before, after):
        reason = _reason(names, value, path.absolute().parent, _kind(after, names))
        if reason:
            problems.append(f"{'.'.join(names)}: {reason}")
    if problems:
        remedy = "change the recipe, or run it on its machine with `lifecycle run --set`"
        raise RecipeError("\n  ".join([f"parameters of a deployment may not do this; {remedy}:", *problems]))


def _changes(before: Any, after: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each field in which two recipe trees differ, with its new value; None for a removed field."""
    if isinstance(before, dict) or isinstance(after, dict):
        old, new = (tree if isinstance(tree, dict) else {} for tree in (before, after))
        for key in {**old, **new}:
            yield from _changes(old.get(key), new.get(key), (*names, str(key)))
    elif isinstance(after, list) and after != before:
        for position, value in enumerate(after):
            yield from _changes(None, value, (*names, str(position)))
    if not isinstance(after, dict | list) and after != before:
        yield names, after


def _kind(tree: dict[str, Any], names: tuple[str, ...]) -> type[BaseModel] | None:
    """Return the config class of the stage that a recipe's field belongs to; None for an unknown kind of stage."""
    stage = tree["stages"].get(names[1]) if names[0] == "stages" and len(names) > 1 else None
    return KINDS.get(str(stage.get("kind"))) if isinstance(stage, dict) else None


def _reason(names: tuple[str, ...], value: Any, folder: Path, kind: type[BaseModel] | None) -> str | None:
    if names[2:3] == ("execution",) and OF_THE_RECIPE.intersection(names[3:4]):
        return "only the recipe says where a stage runs, and in which environment"
    if names[-1] in CODE_FIELDS:
        return "only the recipe says whose code is trusted"
    if len(names) > 3 and names[-1] in SERVER_FIELDS:
        return "only the recipe says which server is asked, and with which key"
    if kind is PublishConfig and names[2:3] != ("execution",):
        return "only the recipe says what is published, and where"
    paths = _path_fields(kind) if kind else ()
    if not isinstance(value, str) or not any(_is_of(names[2:], field) for field in paths):
        return None
    if PYTHON_FILE.search(value):
        return "only the recipe names programs"
    return None if _is_inside(value, folder) else f"names a file outside the recipe's folder {folder}"


def _path_fields(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the fields of a config class whose text may be a path; other texts may look like one (`/no_think`).

    `*` stands for any name that a recipe gives, and for any place in a list.
    """
    for name, field in model.model_fields.items():
        if find_marker(field, OutsideInput) or find_marker(field, SourceText):
            yield (*above, name)
        for inner, between in _blocks(field.annotation):
            yield from _path_fields(inner, (*above, name, *between))


def _blocks(annotation: Any) -> Iterator[tuple[type[BaseModel], tuple[str, ...]]]:
    """Yield each config class in a field's type, with a `*` for every dict and list between them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ()
    given = ("*",) if get_origin(annotation) in (dict, tuple, list) else ()
    for argument in get_args(annotation):
        yield from ((inner, (*given, *between)) for inner, between in _blocks(argument))


def _is_of(names: tuple[str, ...], field: tuple[str, ...]) -> bool:
    """Return whether a dotted recipe path names the given config field or an item in it. Both are tuples of names."""
    return len(names) >= len(field) and all(known in ("*", name) for known, name in zip(field, names, strict=False))


def _is_inside(text: str, folder: Path) -> bool:
    """Return whether a path stays inside a folder, following symbolic links. A source that is no path does."""
    try:
        path = absolute(Path(text.removeprefix("file://")), folder)
        return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
    except (OSError, ValueError, RuntimeError):  # it is no path, or `~` of an unknown user
        return False
