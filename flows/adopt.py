"""Adopt a model or dataset folder from outside: an artifact as if a download stage had fetched `file://PATH`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from flows.record import Artifact
from flows.store import Store


def adopt(store: Store, path: Path, product: Literal["model", "dataset"], name: str) -> Artifact:
    """Copy a folder into the store and commit it; a recipe's `file://PATH` download then finds it cached.

    Raises `ModelError` or `DataError` for symbolic links, pickle weights, or a folder that is neither.
    """
    raise NotImplementedError
