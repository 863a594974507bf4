"""Hashing (sha256) of large files in parallel, with progress on stderr and a cache, so that each is hashed once.

Hashes are in `<LIFECYCLE_HOME>/cache/hashes.sqlite`, by path, size, times and inode; not of a file that changed within
the last seconds, as a file system's clock may be too coarse to tell its next change.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
import sys
import threading
import time
from collections.abc import Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stages.core.errors import TransientError
from stages.core.lines import say

CHUNK_BYTES = 1 << 20
MIN_CACHED_BYTES = 1 << 20
"""Smallest size in bytes of a file whose hash is cached; smaller files are read as fast as they are looked up."""
MANY_FILES = 1000
"""Number of files from which on all are cached, also small ones: opening each would take as long as reading it."""
MIN_LIMITED_BYTES, BYTES_TO_OPEN = 16 << 20, 1 << 16
"""Smallest total size of files whose hashing has a time limit, and bytes that opening a file counts as."""
SETTLED_S = 2
THREADS = 4
REPORT_INTERVAL_S = 5
GIB = 1 << 30


def content_hasher(algorithm: Literal["sha256", "git-blob-sha1"], size_bytes: int) -> hashlib._Hash:
    """Return a hasher for a file's content with sha256, or as a Git blob id, which also covers the file's size."""
    if algorithm == "sha256":
        return hashlib.sha256()
    return hashlib.sha1(f"blob {size_bytes}\0".encode(), usedforsecurity=False)


def sha256_of_files(files: Mapping[str, Path], limit_s: float | None = None) -> dict[str, str]:
    """Return the sha256 hex digest of each file, by name; progress is printed on stderr if it takes long.

    limit_s: time after which(but for small files) TransientError is raised; finished files are not hashed again.Raises
    `OSError`.
    """
    statuses = {name: os.lstat(path) for name, path in files.items()}  # half the time of a Path's
    links = {name for name, status in statuses.items() if stat.S_ISLNK(status.st_mode)}
    statuses |= {name: files[name].stat() for name in links}
    known = _known(files, statuses, links) if len(files) >= MANY_FILES else _Known({}, {})
    rest = {name: path for name, path in files.items() if name not in known.digests}
    total_bytes = sum(statuses[name].st_size for name in rest)
    is_small = total_bytes + len(rest) * BYTES_TO_OPEN < MIN_LIMITED_BYTES
    end_s = None if limit_s is None or is_small else time.monotonic() + limit_s
    job = _Job(total_bytes)
    pool = ThreadPoolExecutor(THREADS)
    try:
        pending = {name: pool.submit(job.hash, path) for name, path in rest.items()}
        hashed: dict[str, str] = {}
        try:
            for name, future in pending.items():
                hashed[name] = future.result(end_s and max(0.0, end_s - time.monotonic()))
        finally:
            _keep_many(known, hashed, statuses)
        return {name: known.digests.get(name) or hashed[name] for name in files}
    except TimeoutError as error:
        if limit_s is None:  # a file system's
            raise
        slow = f"hashing its {total_bytes / GIB:.1f} GiB takes longer than {limit_s:g} s"
        raise TransientError(f"{slow}; `lifecycle run` takes the time, once") from error
    finally:
        job.stop()  # otherwise Ctrl-C would wait until the last file is read
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class _Known:
    """Digests from the cache for some of many files, by name, and the keys of all of them that may be kept."""

    digests: dict[str, str]
    keys: dict[str, str]


def _known(files: Mapping[str, Path], statuses: Mapping[str, os.stat_result], links: Container[str]) -> _Known:
    """Look up many files, of any size, at once: those of one folder stand together in the cache."""
    folders: dict[str, str] = {}
    keys = {}
    for name, path in files.items():
        folder, _, last = str(path).rpartition("/")
        if name in links:
            keys[name] = _key(os.path.realpath(path), statuses[name])
            continue
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        keys[name] = _key(f"{folders[folder]}/{last}", statuses[name])
    digests: dict[str, str] = {}
    with _database() as database:
        if database:
            first, last = min(keys.values()), max(keys.values())
            found = dict(database.execute("SELECT file, sha256 FROM hashes WHERE file BETWEEN ? AND ?", (first, last)))
            digests = {name: found[key] for name, key in keys.items() if key in found}
    return _Known(digests, keys)


def _keep_many(known: _Known, hashed: Mapping[str, str], statuses: Mapping[str, os.stat_result]) -> None:
    """Keep the digests of many files that were just hashed, but of those that changed within the last seconds."""
    before = time.time() - SETTLED_S
    rows = [
        (known.keys[name], digest)
        for name, digest in hashed.items()
        if name in known.keys and max(statuses[name].st_mtime, statuses[name].st_ctime) < before
    ]
    with _database() as database:
        if database and rows:
            database.executemany("INSERT OR REPLACE INTO hashes VALUES (?, ?)", rows)
            database.commit()


def _key(path: str, status: os.stat_result) -> str:
    return f"{path!r}|{status.st_size}|{status.st_mtime_ns}|{status.st_ctime_ns}|{status.st_ino}"


class _Job:
    """Hashing of several files in threads, which another thread can stop."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._reported_s = time.monotonic()
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def hash(self, path: Path) -> str:
        """Return a file's sha256 hex digest, if unchanged from the cache; after `stop`, which ends reading, wrong."""
        status = path.stat()
        if status.st_size < MIN_CACHED_BYTES:
            return self._read(path)
        key = _key(str(path.resolve()), status)
        known = _lookup(key)
        if known:
            self._count(status.st_size)
            return known
        # By the status from before: if the file changes while it is read, its next status makes another key.
        settled = time.time() - max(status.st_mtime, status.st_ctime) > SETTLED_S
        digest = self._read(path)
        if settled and not self._stopped.is_set():
            _keep(key, digest)
        return digest

    def _read(self, path: Path) -> str:
        hasher = hashlib.sha256()
        with path.open("rb") as stream:
            while not self._stopped.is_set() and (chunk := stream.read(CHUNK_BYTES)):
                hasher.update(chunk)
                self._count(len(chunk))
        return hasher.hexdigest()

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            now_s = time.monotonic()
            if now_s - self._reported_s >= REPORT_INTERVAL_S:
                self._reported_s = now_s
                done, total = self._done_bytes / GIB, self._total_bytes / GIB
                say(f"hashing files from outside the store: {done:.1f} of {total:.1f} GiB", sys.stderr)


def _lookup(key: str) -> str | None:
    with _database() as database:
        row = database.execute("SELECT sha256 FROM hashes WHERE file = ?", (key,)).fetchone() if database else None
    return row[0] if row else None


def _keep(key: str, digest: str) -> None:
    with _database() as database:
        if database:
            database.execute("INSERT OR REPLACE INTO hashes VALUES (?, ?)", (key, digest))
            database.commit()


@contextmanager
def _database() -> Iterator[sqlite3.Connection | None]:
    """Open the database of file hashes in `$LIFECYCLE_HOME`; yield None if it is not writable, so nothing is cached."""
    file = Path(os.environ.get("LIFECYCLE_HOME", ".lifecycle")).absolute() / "cache" / "hashes.sqlite"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = sqlite3.connect(file, timeout=5)
        opened.execute("CREATE TABLE IF NOT EXISTS hashes (file TEXT PRIMARY KEY, sha256 TEXT NOT NULL)")
    except (OSError, sqlite3.Error):
        yield None
        return
    with closing(opened):
        yield opened
