"""Inputs from outside the store: content hashes of paths, resolved revisions, versions of programs (I/O)."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from concurrent.futures import ThreadPoolExecutor

from pydantic import JsonValue

from flows.recipe.recipe import Recipe
from flows.store.content import hash_path
from stages.core.contract import StageConfig
from stages.core.errors import RecipeError, TransientError

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
    missing = [
        f"stages.{name}.{field}: there is no file or folder {path}"
        for (name, field), path in paths.items()
        if not path.exists()
    ]
    if missing:
        raise RecipeError("\n".join(missing))
    hashes = {path: hash_path(path) for path in set(paths.values())}
    with ThreadPoolExecutor() as executor:  # hubs are slow to answer, and slower not to
        resolved = dict(zip(chosen, executor.map(_resolve, chosen.values()), strict=True))
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


def _resolve(config: StageConfig) -> dict[str, JsonValue] | TransientError:
    try:
        return config.resolve_outside()
    except TransientError as error:
        return error
