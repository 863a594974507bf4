"""Inputs from outside the store: content hashes of paths, resolved revisions, versions of programs (I/O)."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import JsonValue

from flows.recipe import Recipe

Outside = dict[str, dict[str, JsonValue]]
"""stage name → {field path or name: content hash, revision, …}"""


def resolve_outside(recipe: Recipe, stages: Collection[str] | None = None) -> Outside:
    """Resolve the outside inputs of the named stages (default: all). May ask the network.

    Raises `RecipeError` when a path does not exist, and what the stages' own `resolve_outside` raise.
    """
    raise NotImplementedError
