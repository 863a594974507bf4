"""Verify artifacts, and collect what nothing needs any more."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR

from pydantic import ValidationError

from flows.store.content import RECORD_FILE, files_in, hash_files
from flows.store.record import Artifact, Index
from flows.store.store import TRASH, Store
from stages.core.cache_entries import entries_of
from stages.core.contract import StageInput
from stages.core.errors import ResourceError, StoreError

SECONDS_PER_DAY = 86_400.0
RESUME_KEY_LENGTH = 12


@dataclass(frozen=True)
class Verification:
    """What re-hashing found in one artifact; whole when the three are empty. Paths are relative to its folder."""

    artifact: Artifact
    damaged: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Whether the artifact is what was recorded."""
        return not (self.damaged or self.missing or self.extra)


@dataclass(frozen=True)
class Garbage:
    """A folder or file that may go, its size, and why. `used_s`: when it was last used (since the epoch)."""

    path: Path
    size_bytes: int
    used_s: float
    reason: str


def verify(store: Store) -> Iterator[Verification]:
    """Re-hash every file of every artifact, one artifact after the other."""
    for artifact in store.index().artifacts:
        recorded = artifact.record.files
        there = {name for name, _ in files_in(artifact.folder)}
        with store.explained(f"verify {artifact.folder}"):
            found = hash_files(artifact.folder)
        yield Verification(
            artifact,
            damaged=tuple(name for name in recorded if name in found and found[name] != recorded[name]),
            missing=tuple(sorted(recorded.keys() - there)),
            extra=tuple(sorted(there - recorded.keys())),
        )


@dataclass(frozen=True)
class Collected:
    """What `collect` removed, and why other garbage is still there, a sentence each."""

    removed: tuple[Garbage, ...]
    failures: tuple[str, ...]


def find_garbage(
    store: Store,
    protected: Collection[str] = (),
    older_than_days: float = 7.0,
    rooms: Iterable[Path] = (),
    refreshing_since_s: float = math.inf,
) -> list[Garbage]:
    """What nothing needs: superseded artifacts, leftovers of removals; and, unless used within `older_than_days`,
    leftovers of crashes, work folders that nobody works in, cache entries.

    Kept are the artifact of each stage name of each recipe that was built or used last, those whose version is in
    `protected` (promoted models), those that unfinished work builds on, and all that these were built from; and cache
    entries used since the oldest running refresh began, at `refreshing_since_s`. rooms: of caches outside the store.
    """
    index = store.index()
    before_s = time.time() - older_than_days * SECONDS_PER_DAY
    work = [*store.root.glob(".work/*/*")]
    locked = {folder for folder in work if store.is_locked(folder.parent.name, folder.name[-RESUME_KEY_LENGTH:])}
    abandoned = {folder for folder in work if _used_s(folder) <= before_s and folder not in locked}
    in_use = {path for folder in work if folder not in abandoned for path in _inputs(folder)}
    kept = needed(index, protected, in_use)
    superseded = [artifact for artifact in index.artifacts if artifact not in kept]
    rooms = (*store.root.glob(".cache/*/*"), *rooms)
    unused_s = min(before_s, refreshing_since_s)
    old = [
        *((folder, "abandoned work", before_s) for folder in abandoned),
        *((folder, "left over from a crash", before_s) for folder in index.leftovers),
        *((entry, "cache entry", unused_s) for room in rooms for entry in entries_of(room)),
    ]
    trash = sorted(store.root.glob(f"{TRASH}/*"))
    return [
        *(Garbage(one.folder, size_bytes(one.folder), one.used_s, "superseded") for one in superseded),
        *(Garbage(path, size_bytes(path), _used_s(path), "left over from a removal") for path in trash),
        *(
            Garbage(path, size_bytes(path), used_s, f"{reason}, unused for {older_than_days:g} days")
            for path, reason, limit_s in sorted(old)
            if (used_s := _used_s(path)) <= limit_s
        ),
    ]


def needed(index: Index, protected: Collection[str], in_use: Collection[Path]) -> list[Artifact]:
    """Artifacts to keep: the latest of each stage, the named ones, and all that these were built from. Pure."""
    latest: dict[tuple[str | None, str, str], Artifact] = {}
    for artifact in sorted(index.artifacts, key=lambda one: one.used_s):
        latest[artifact.record.recipe, artifact.record.kind, artifact.record.stage] = artifact
    todo = [*latest.values()]
    todo += [one for one in index.artifacts if one.record.version in protected or one.folder in in_use]
    kept: dict[Path, Artifact] = {}
    while todo:
        artifact = todo.pop()
        if artifact.folder not in kept:
            kept[artifact.folder] = artifact
            entries = artifact.record.upstream.values()
            todo += [found for entry in entries if (found := index.find(entry.kind, entry.version))]
    return list(kept.values())


def collect(store: Store, garbage: Iterable[Garbage]) -> Collected:
    """Remove what `find_garbage` found, but for what was used since. What cannot be removed does not stop the rest."""
    removed, failures = [], []
    for one in garbage:
        try:
            if os.path.lexists(one.path) and _used_s(one.path) <= one.used_s:
                store.remove(one.path)
                removed.append(one)
        except (StoreError, ResourceError) as error:
            failures.append(str(error))
    return Collected(tuple(removed), tuple(failures))


def _inputs(work: Path) -> Collection[Path]:
    try:
        return StageInput.model_validate_json((work / "config.json").read_bytes()).inputs.values()
    except (OSError, ValidationError):
        return ()


def _used_s(path: Path) -> float:
    """When an artifact was last found cached; when anything in another folder was written, or its use was noted."""
    with suppress(OSError):
        return (path / RECORD_FILE).stat().st_mtime
    return max((found.st_mtime for found in _stats(path)), default=0.0)


def size_bytes(path: Path) -> int:
    """Return how much a file, or all files of a folder, hold."""
    return sum(found.st_size for found in _stats(path) if not S_ISDIR(found.st_mode))


def _stats(path: Path) -> Iterator[os.stat_result]:
    """Yield the state of an entry and of all below it; links are not followed, what goes meanwhile is left out."""
    for one in (path, *(path.rglob("*") if path.is_dir() and not path.is_symlink() else ())):
        with suppress(OSError):
            yield one.lstat()
