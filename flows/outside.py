"""Inputs from outside the store: content hashes of paths, resolved revisions, versions of programs (I/O)."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import JsonValue

from flows.recipe.recipe import Recipe
from flows.store.content import hash_path
from stages.errors import RecipeError

Outside = dict[str, dict[str, JsonValue]]
"""stage name → {field path or name: content hash, revision, …}"""


def resolve_outside(recipe: Recipe, stages: Collection[str] | None = None) -> Outside:
    """Resolve the outside inputs of the named stages (default: all). May ask the network.

    Raises `RecipeError` when a path does not exist, and what the stages' own `resolve_outside` raise.
    """
    chosen = {name: config for name, config in recipe.stages.items() if stages is None or name in stages}
    missing = [
        f"stages.{name}.{field}: there is no file or folder {path}"
        for name, config in chosen.items()
        for field, path in config.outside_paths().items()
        if not path.exists()
    ]
    if missing:
        raise RecipeError("\n".join(missing))
    paths = {path for config in chosen.values() for path in config.outside_paths().values()}
    hashes = {path: hash_path(path) for path in paths}
    return {
        name: {**config.resolve_outside(), **{field: hashes[path] for field, path in config.outside_paths().items()}}
        for name, config in chosen.items()
    }
