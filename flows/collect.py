"""Verify artifacts, and collect those that nothing needs any more."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from flows.record import Artifact
from flows.store import Store


@dataclass(frozen=True)
class Verdict:
    """What re-hashing found in one artifact; whole when the three are empty. Paths are relative to its folder."""

    artifact: Artifact
    damaged: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]


@dataclass(frozen=True)
class Garbage:
    """A folder that may go, its size, and why."""

    path: Path
    size_bytes: int
    reason: str


def verify(store: Store) -> list[Verdict]:
    """Re-hash every file of every artifact."""
    raise NotImplementedError


def find_garbage(store: Store, protected: Collection[str] = (), older_than_days: float = 7.0) -> list[Garbage]:
    """What nothing needs: superseded artifacts, leftovers, abandoned work folders, old cache entries.

    Kept are the newest (built or used last) artifact of each stage name of each recipe, those whose version is in
    `protected` (promoted models), those that a running stage reads, and all that these were built from.
    """
    raise NotImplementedError


def collect(store: Store, garbage: Collection[Garbage]) -> None:
    """Remove what `find_garbage` found."""
    raise NotImplementedError
