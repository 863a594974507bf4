"""Verification of artifacts against their hashes, and garbage collection of the artifact store."""

import math
import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR

from flows.store.content import RECORD_FILE, files_in, hash_files
from flows.store.record import Artifact, Index
from flows.store.store import TRASH, Store
from stages.core.approval import read_approval
from stages.core.cache import entries_of
from stages.core.contract import StageInput
from stages.core.errors import ResourceError, StoreError

SECONDS_PER_DAY = 86_400.0
RESUME_KEY_LENGTH = 12


@dataclass(frozen=True)
class Verification:
    """Result of verifying one artifact: its files with wrong hashes, missing files and extra files."""

    artifact: Artifact
    damaged: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Return whether every file of the artifact has its recorded hash and no other file is there."""
        return not (self.damaged or self.missing or self.extra)


@dataclass(frozen=True)
class Garbage:
    """Folder or file that may be removed, with its size, the reason and its last use in seconds since the epoch."""

    path: Path
    size_bytes: int
    used_s: float
    reason: str


def verify(store: Store) -> Iterator[Verification]:
    """Verify each artifact by hashing all its files again, and yield the results one by one."""
    for artifact in store.index().artifacts:
        recorded = artifact.record.files
        names = {name for name, _ in files_in(artifact.folder)}
        with store.explained(f"verify {artifact.folder}"):
            hashes = hash_files(artifact.folder)
        yield Verification(
            artifact,
            damaged=tuple(name for name in recorded if name in hashes and hashes[name] != recorded[name]),
            missing=tuple(sorted(recorded.keys() - names)),
            extra=tuple(sorted(names - recorded.keys())),
        )


@dataclass(frozen=True)
class Collected:
    """Result of a garbage collection: what was removed, and a sentence for each thing that could not be removed."""

    removed: tuple[Garbage, ...]
    failures: tuple[str, ...]


def find_garbage(
    store: Store,
    protected: Collection[str] = (),
    older_than_days: float = 7.0,
    rooms: Iterable[Path] = (),
    refreshing_since_s: float = math.inf,
) -> list[Garbage]:
    """Return the artifacts, work folders and cache entries that may be removed.

    That is: superseded artifacts and leftovers of removals; and, if unused for `older_than_days`, leftovers of crashes,
    work folders that no process works in, and cache entries. Kept are, of each stage name of each recipe, the artifact
    that was built or used last; artifacts whose version is in `protected` (promoted models); those that unfinished work
    builds on; all that these were built from; and cache entries used since the oldest running refresh began, at
    `refreshing_since_s`. rooms: of caches outside the store.
    """
    index = store.index()
    before_s = time.time() - older_than_days * SECONDS_PER_DAY
    work = [*store.root.glob(".work/*/*")]
    # A stage at work holds the lock of its resume key, even if it writes nothing for days.
    locked = {folder for folder in work if store.is_locked(folder.parent.name, folder.name[-RESUME_KEY_LENGTH:])}
    abandoned = {folder for folder in work if used_s(folder) <= before_s and folder not in locked}
    inputs = [StageInput.read_or_none(folder / "config.json") for folder in work if folder not in abandoned]
    in_use = {path for continued in inputs if continued for path in continued.inputs.values()}
    kept = needed(index, protected, in_use)  # inputs of work that may be continued are needed, too
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
        *(Garbage(path, size_bytes(path), used_s(path), "left over from a removal") for path in trash),
        *(
            Garbage(path, size_bytes(path), latest_s, f"{reason}, unused for {older_than_days:g} days")
            for path, reason, limit_s in sorted(old)
            if (latest_s := used_s(path)) <= limit_s
        ),
    ]


def needed(index: Index, protected: Collection[str], in_use: Collection[Path]) -> list[Artifact]:
    """Return the artifacts to keep: the latest of each stage, protected ones, those in use, and all their ancestors."""
    # Buckets tell times in whole seconds.
    by_use = sorted(index.artifacts, key=lambda one: (one.used_s, one.record.finished))
    # The one used last overwrites those used before.
    latest = {(one.record.recipe, one.record.kind, one.record.stage): one for one in by_use}
    others = [
        one
        for one in index.artifacts
        if one.record.version in protected or one.folder in in_use or (one.pending and _awaits_approval(one))
    ]
    return [*index.closure(*latest.values(), *others)]


def _awaits_approval(artifact: Artifact) -> bool:
    approval = read_approval(artifact.folder)
    return approval is not None and approval.is_awaited


def collect(store: Store, garbage: Iterable[Garbage]) -> Collected:
    """Remove the files and folders that were found to be unneeded, unless used since; go on after failures."""
    removed, failures = [], []
    for item in garbage:
        try:
            if os.path.lexists(item.path) and used_s(item.path) <= item.used_s:
                store.remove(item.path)
                removed.append(item)
        except (StoreError, ResourceError) as error:
            failures.append(str(error))
    return Collected(tuple(removed), tuple(failures))


def used_s(path: Path) -> float:
    """Return the time of an artifact's last use, or of any other path's latest change, in seconds since the epoch."""
    with suppress(OSError):
        # Touched whenever the artifact is found cached.
        return (path / RECORD_FILE).stat().st_mtime
    return max((found.st_mtime for found in _stats(path)), default=0.0)


def size_bytes(path: Path) -> int:
    """Return the size in bytes of a file, or of all files in a folder together."""
    return sum(found.st_size for found in _stats(path) if not S_ISDIR(found.st_mode))


def _stats(path: Path) -> Iterator[os.stat_result]:
    """Yield the status of a path and all below it, without following links; vanished files are left out."""
    for one in (path, *(path.rglob("*") if path.is_dir() and not path.is_symlink() else ())):
        with suppress(OSError):
            yield one.lstat()
