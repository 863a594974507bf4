"""Inputs from outside the store: content hashes of paths, resolved revisions, versions of programs (I/O)."""

from __future__ import annotations

import re
from collections.abc import Collection, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import JsonValue

from flows.recipe.recipe import Recipe
from flows.recipe.text import shorten
from flows.store.content import hash_path, outside_files
from stages.core.contract import StageConfig
from stages.core.errors import EvaluationError, LifecycleError, RecipeError, TransientError
from stages.download.config import DownloadConfig
from stages.evaluate.config import EvaluateConfig

TASK = re.compile(r"^(task|group):", re.MULTILINE)
Outside = dict[str, dict[str, JsonValue]]
"""stage name → {field path or name: content hash, revision, …}"""


def resolve_outside(
    recipe: Recipe, stages: Collection[str] | None = None, unreachable: MutableMapping[str, str] | None = None
) -> Outside:
    """Resolve the outside inputs of the named stages (default: all). May ask the network.

    unreachable: where given, a stage whose source does not answer is noted there with the reason, and has no inputs.
    Raises `RecipeError` when a path does not exist, and what the stages' own `resolve_outside` raise.
    """
    chosen = {name: config for name, config in recipe.stages.items() if stages is None or name in stages}
    paths = {(name, field): path for name, config in chosen.items() for field, path in config.outside_paths().items()}
    problems = {f"stages.{name}.{field}": _problem(path) for (name, field), path in paths.items()}
    if any(problems.values()):
        raise RecipeError("\n".join(f"{field}: {problem}" for field, problem in problems.items() if problem))
    hashes = {path: hash_path(path) for path in set(paths.values())}
    # What lies here is hashed in the thread that hears Ctrl-C; hubs are slow to answer, and slower not to.
    here = {name: _resolve(recipe, name) for name, config in chosen.items() if _lies_here(config)}
    elsewhere = [name for name in chosen if name not in here]
    with ThreadPoolExecutor() as executor:
        asked = executor.map(lambda name: _resolve(recipe, name), elsewhere)
        resolved = here | dict(zip(elsewhere, asked, strict=True))
    outside: Outside = {}
    for name, found in resolved.items():
        if isinstance(found, TransientError):
            if unreachable is None:
                raise found
            unreachable[name] = str(found)
            found = {}
        outside[name] = dict(found)
    for (name, field), path in paths.items():
        outside[name][field] = hashes[path]
    return outside


def _problem(path: Path) -> str | None:
    """Why the content of a path cannot be read to its end, if so."""
    try:
        if not path.exists():
            return f"there is no file or folder {path}"
        special = next((file for file in outside_files(path).values() if _is_special(file)), None)
    except OSError as error:
        return f"cannot read {shorten(str(path), 200)}: {error.strerror}"
    return f"{special} is no regular file; name a file, or a folder of files" if special else None


def _is_special(file: Path) -> bool:
    """Reading it may never end: a device, a pipe, or what the kernel makes as it is read."""
    return not file.is_file() or file.resolve().parts[:2] in (("/", "proc"), ("/", "sys"))


def _lies_here(config: StageConfig) -> bool:
    return isinstance(config, DownloadConfig) and config.source.hub == "file"


def _resolve(recipe: Recipe, name: str) -> dict[str, JsonValue] | TransientError:
    """Raises what `config.resolve_outside` raises, with the stage (and of a download, the field) that it is about."""
    config = recipe.stages[name]
    where = f"stages.{name}.{config.product}" if isinstance(config, DownloadConfig) else f"stages.{name}"
    try:
        return config.resolve_outside()
    except TransientError as error:
        return type(error)(f"{where}: {error}")
    except EvaluationError as error:
        raise EvaluationError(f"{where}: {_of_a_file_beside(recipe, config) or error}") from error
    except LifecycleError as error:
        raise type(error)(f"{where}: {error}") from error


def _of_a_file_beside(recipe: Recipe, config: StageConfig) -> str | None:
    """What to say of a task that is unknown, while a file of its name lies where nobody looks for it."""
    if not isinstance(config, EvaluateConfig):
        return None
    found = set(config.task_folder.rglob("*.y*ml")) if config.task_folder else set()
    unknown = set(config.tasks) - {file.stem for file in found}
    files = [file for pattern in ("*.y*ml", "*/*.y*ml") for file in sorted(recipe.folder.glob(pattern))]
    for file in (file for file in files if file.stem in unknown and file.is_file()):
        if TASK.search(file.read_text(encoding="utf-8", errors="replace")):  # a recipe may have the name of its task
            folder = file.parent.relative_to(recipe.folder)
            return f"the task {file.stem} is in {file}, where it is not looked for; write `task_folder: {folder}`"
    return None
