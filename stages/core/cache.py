"""Caches on disk that several processes share: keys, folders made by one process, checksums, and last use for cleanup.

<cache>/<room>/<entry> a file or a folder; where each room of a cache belongs to one kind of content

The last use of an entry is its modification time, which `lifecycle gc` goes by: readers of an entry call `note_use`
(many file systems keep no time of reading, `noatime`). A disk may return other bytes than were written, so files and
folders may get a seal (sha256), compared on reading.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import JsonValue

from stages.core.files import write_atomically

KEY_CHARACTERS = 32
SEAL = ".sha256"
FOLDERS_BELOW_ROOM = {"datasets": 2, "evalscope": 0}
"""Depth of the entries below a top folder of the cache where it is not 1, since a library chose the structure.

In the folder of Hugging Face's `datasets` an entry is a configuration (`json/default-<hash>`); all that EvalScope keeps
in its folder is one entry."""


def note_use(entry: Path) -> None:
    """Record that a cache entry is used now, so that cleanup keeps it; ignore errors (read-only cache)."""
    with suppress(OSError):
        os.utime(entry)


def note_use_of_file(room: Path, file: Path) -> None:
    """Record that the cache entry which holds a file is used now, to keep it; no effect outside the folder `room`."""
    if file.is_relative_to(room):
        depth = FOLDERS_BELOW_ROOM.get(room.name, 1)
        note_use(room.joinpath(*file.relative_to(room).parts[:depth]))


def entries_of(room: Path) -> Iterator[Path]:
    """Yield the entries of one top folder of the cache, for cleanup; a top "folder" that is a file is its own entry."""
    depth = FOLDERS_BELOW_ROOM.get(room.name, 1)
    level = [room]
    for _ in range(depth):
        files = [path for path in level if path.is_symlink() or not path.is_dir()]
        yield from files
        level = [inner for path in level if path not in files for inner in path.iterdir()]
    yield from level


def content_key(parts: dict[str, JsonValue]) -> str:
    """Return a cache key: the hash of the given inputs as JSON, so that equal inputs have equal keys."""
    canonical = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:KEY_CHARACTERS]


def file_digest(path: Path) -> str:
    """Return the sha256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def cached_folder(cache: Path, key: str, is_complete: Callable[[Path], bool], make: Callable[[Path], None]) -> Path:
    """Return the cache folder `cache/key`; if it is missing or incomplete, one process fills it while others wait.

    `make` fills an empty folder, which is then renamed. Leftovers of a failed one are removed.
    """
    from filelock import FileLock  # which recipes do without: their configs import this module

    entry = cache / key
    if is_complete(entry):
        return entry
    cache.mkdir(parents=True, exist_ok=True)
    # A soft lock is a file, which would stay behind a killed process.
    with FileLock(cache / f".{key}.lock", fallback_to_soft=False):
        if is_complete(entry):  # another process filled it while this one waited
            return entry
        partial = cache / f".{key}.partial"
        for stale in (partial, entry):
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir()
        try:
            make(partial)
            # In one step, once it is whole: a crash before it leaves the partial folder only.
            partial.rename(entry)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return entry


def write_seal(entry: Path) -> None:
    """Write the sha256 of a finished cache entry (a file, or all files of a folder), to detect later damage."""
    write_atomically(_seal_of(entry), json.dumps(_digests(entry)))


def is_sealed(entry: Path) -> bool:
    """Return whether a cache entry exists and has its checksum file; the entry's content is not verified."""
    return entry.exists() and _seal_of(entry).is_file()


def is_intact(entry: Path) -> bool:
    """Return whether a cache entry still has the content of its checksum file; if so, record its use."""
    try:
        intact = bool(json.loads(_seal_of(entry).read_bytes()) == _digests(entry))
    except (OSError, ValueError):
        return False
    if intact:
        note_use(entry)
        note_use(_seal_of(entry))
    return intact


def _seal_of(entry: Path) -> Path:
    return entry / SEAL if entry.is_dir() else entry.with_name(entry.name + SEAL)


def _digests(entry: Path) -> dict[str, str]:
    paths = [path for path in entry.iterdir() if path.name != SEAL] if entry.is_dir() else [entry]
    return {path.name: file_digest(path) for path in sorted(paths)}
