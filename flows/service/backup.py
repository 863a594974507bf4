"""Backups of a lifecycle home, taken while it runs, incremental by content, and their restoration.

<folder>/blobs/<2>/<sha256>      contents of files, each once for all backups
<folder>/backups/<time>.json     a backup: path, sha256, size, mode and time of each file; dumps; written last

Ledgers and databases are read before the artifacts that they name. What is being built is
not part of a backup, nor is the key of the servers: a restored home makes its own, as a copied home does.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import SplitResult

from filelock import FileLock
from pydantic import Field, ValidationError

from flows.ledger.home import home, store_root
from flows.servers.records import mark_as_copy
from flows.service.database_dumps import VARIABLES, dump, named_databases, restore_dump
from flows.store.content import RECORD_FILE
from stages.core.contract import StrictModel
from stages.core.errors import StoreError, full_disk_named
from stages.core.fields import what_is_wrong
from stages.core.files import write_atomically

BACKUPS, BLOBS = "backups", "blobs"
LEFT_OUT = ("servers.key", "servers.json", "servers.heartbeat", "reserve", "worker", "servers", "supervisor", "slots")
"""Names in the home of what belongs to its processes, or holds its key."""
LEFT_OUT_ANYWHERE = ("*.lock", "*-wal", "*-shm", "*-journal", "heartbeat", ".*.[0-9]*")
"""Patterns of names of locks, of SQLite's logs, which its backup contains, and of files that are being written."""
SQLITE = b"SQLite format 3\0"
DUMPED = ".database-dump"
PIECE_BYTES = 1 << 20
PRIVATE = 0o700


class SavedFile(StrictModel):
    """File of a backup. mtime_ns, size: by them the next backup sees that it has not changed. link: of links alone."""

    sha256: str = Field("", pattern="^([0-9a-f]{64})?$")
    size: int = 0
    mode: int = 0o600
    mtime_ns: int = 0
    link: str | None = None


class Backup(StrictModel):
    """Contents of `backups/<time>.json`: saved files by their path in the home, and dumps of databases by server."""

    home: str
    files: dict[str, SavedFile]
    databases: dict[str, SavedFile] = Field(default_factory=dict)


class BackupResult(StrictModel):
    """Outcome of a backup or a restoration: its name, number of files, their bytes, and the bytes that were new."""

    name: str
    num_files: int
    num_bytes: int
    new_bytes: int
    left_out: tuple[str, ...] = ()


def back_up(folder: Path) -> BackupResult:
    """Save this lifecycle home, which may be in use, in a folder of backups. Raises `StoreError`, `ResourceError`."""
    source = home()
    if not source.is_dir():
        raise StoreError(f"backing up {source}: there is no home; set LIFECYCLE_HOME to one")
    if folder.resolve().is_relative_to(source.resolve()):
        raise StoreError(f"backing up {source} into {folder}, which is inside it; name a folder elsewhere")
    with full_disk_named("backing up", folder):
        for made in (folder, folder / BACKUPS, folder / BLOBS):
            made.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        with FileLock(folder / "backup.lock", fallback_to_soft=False):
            names = backup_names(folder)
            before = read_backup(folder, names[-1]).files if names else {}
            files: dict[str, SavedFile] = {}
            databases, new_bytes = _dump_databases(folder)
            for path in _files(source):
                with suppress(FileNotFoundError):  # removed meanwhile
                    name = path.relative_to(source).as_posix()
                    files[name], added = _save(path, before.get(name), folder)
                    new_bytes += added
            name = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
            if names and name <= names[-1]:  # within a second, or after the clock was set back
                name = f"{names[-1]}-next"
            backup = Backup(home=str(source), files=files, databases=databases)
            write_atomically(folder / BACKUPS / f"{name}.json", backup.model_dump_json())
    named = tuple(
        variable for server, variable in VARIABLES.items() if os.environ.get(variable) and server not in databases
    )
    total = sum(saved.size for saved in (*files.values(), *databases.values()))
    return BackupResult(name=name, num_files=len(files), num_bytes=total, new_bytes=new_bytes, left_out=named)


def _dump_databases(folder: Path) -> tuple[dict[str, SavedFile], int]:
    """Save dumps of the databases that the environment names; return their entries and the number of new bytes."""
    dumps, new_bytes = {}, 0
    for server, url in named_databases().items():
        dumped = folder / BLOBS / f".dump-{os.getpid()}"
        try:
            dumped.touch(mode=0o600)
            dump(server, url, dumped)
            dumps[server], added = _save(dumped, None, folder)
            new_bytes += added
        finally:
            dumped.unlink(missing_ok=True)
    return dumps, new_bytes


def restore(folder: Path, name: str | None = None) -> BackupResult:
    """Restore a backup (default: the latest) as this lifecycle home, which must not exist; every hash is checked.

    It counts as a copy: its servers start with a key of their own and paused schedules. Dumps go into the databases
    that the environment names here. Raises `StoreError` for a damaged backup, of which nothing is restored.
    """
    target = home()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise StoreError(f"restoring to {target}, which exists; move it away, or set LIFECYCLE_HOME to a new folder")
    names = backup_names(folder)
    if not names or (name and name not in names):
        raise StoreError(
            f"restoring {name or 'the latest backup'} of {folder}: found {', '.join(names) or 'no backup'}"
        )
    name = name or names[-1]
    backup = read_backup(folder, name)
    databases = _databases_for(backup)
    partial = target.with_name(f".{target.name}.restoring-{os.getpid()}")
    try:
        with full_disk_named("restoring", target):
            partial.mkdir(mode=PRIVATE, parents=True)
            for path, saved in backup.files.items():
                _restore_file(folder, partial, path, saved)
            mark_as_copy(partial, restored_database="prefect" in backup.databases)
            for server, saved in backup.databases.items():
                _restore_file(folder, partial, DUMPED, saved)
                restore_dump(server, databases[server], partial / DUMPED)
                (partial / DUMPED).unlink()
            if target.exists():
                target.rmdir()
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    total = sum(saved.size for saved in (*backup.files.values(), *backup.databases.values()))
    return BackupResult(name=name, num_files=len(backup.files), num_bytes=total, new_bytes=total)


def _databases_for(backup: Backup) -> dict[str, SplitResult]:
    """Return the databases into which a backup is restored. Raises `StoreError` if it has others than are named."""
    named = named_databases()
    for server in backup.databases.keys() ^ named.keys():
        variable = VARIABLES.get(server, server)
        if server in named:
            raise StoreError(f"restoring: {variable} names a database, of which the backup has no dump; unset it")
        raise StoreError(
            f"restoring: the backup has a dump of {server}'s database; name a new, empty one in {variable}"
        )
    return named


def backup_names(folder: Path) -> list[str]:
    """Return the names of all backups in a folder, oldest first."""
    return sorted(path.stem for path in (folder / BACKUPS).glob("[!.]*.json"))


def read_backup(folder: Path, name: str) -> Backup:
    """Return a backup by its name. Raises `StoreError` when it cannot be read."""
    file = folder / BACKUPS / f"{name}.json"
    try:
        return Backup.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        wrong = what_is_wrong(error)
        raise StoreError(f"reading the backup {file}: {wrong}; remove it, and the one before it counts") from error


def _files(source: Path) -> Iterator[Path]:
    """Yield the files and links to save: first the ledgers and databases, then the artifacts that these name."""
    entries = sorted(path for path in source.iterdir() if path.name not in LEFT_OUT and path != store_root())
    for entry in sorted(entries, key=Path.is_dir):  # `metrics.json` first: it must not be ahead of the ledgers
        yield from _below(entry)
    for folder in sorted(store_root().glob("[!.]*/*")):
        record = folder / RECORD_FILE
        if record.is_file():
            yield from (path for path in sorted(folder.rglob("*")) if path != record and _is_saved(path))
            yield record


def _below(entry: Path) -> Iterator[Path]:
    if any(PurePosixPath(entry.name).match(pattern) for pattern in LEFT_OUT_ANYWHERE):
        return
    if entry.is_dir() and not entry.is_symlink():
        with suppress(FileNotFoundError):
            for below in sorted(entry.iterdir()):
                yield from _below(below)
    elif _is_saved(entry):
        yield entry


def _is_saved(path: Path) -> bool:
    return path.is_symlink() or path.is_file()  # no sockets and pipes


def _save(path: Path, before: SavedFile | None, folder: Path) -> tuple[SavedFile, int]:
    """Save one file; return its entry and the number of bytes that no earlier backup had."""
    if path.is_symlink():
        return SavedFile(link=str(path.readlink())), 0
    status = path.stat()
    fields = {"mode": stat.S_IMODE(status.st_mode), "mtime_ns": status.st_mtime_ns}
    with path.open("rb") as stream:
        is_database = stream.read(len(SQLITE)) == SQLITE
        # A database in use keeps its time while its log grows, so it is always read.
        if before and not is_database and (before.size, before.mtime_ns) == (status.st_size, status.st_mtime_ns):
            return before, 0
        temporary = folder / BLOBS / f".new-{os.getpid()}"
        try:
            if is_database:
                _copy_database(path, temporary)
                with temporary.open("rb") as copied:
                    sha256, size = _copy(copied, None)
            else:
                stream.seek(0)
                with temporary.open("wb") as copied:
                    sha256, size = _copy(stream, copied)
            blob = _blob(folder, sha256)
            if blob.exists():
                return SavedFile(sha256=sha256, size=size, **fields), 0
            blob.parent.mkdir(mode=PRIVATE, exist_ok=True)
            with temporary.open("rb") as copied:
                os.fsync(copied.fileno())
            temporary.rename(blob)
        finally:
            temporary.unlink(missing_ok=True)
    # The size that was saved: a ledger may have grown since, and the next backup reads it again.
    return SavedFile(sha256=sha256, size=size, **fields), size


def _copy_database(path: Path, target: Path) -> None:
    """Copy an SQLite database that may be in use, as of one moment, with what its log holds."""
    try:
        with (
            closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database,
            closing(sqlite3.connect(target)) as copy,
        ):
            database.backup(copy)
    except sqlite3.Error as error:
        raise StoreError(f"backing up the database {path}: {error}; try again, or stop its server first") from error


def _copy(source: BinaryIO, target: BinaryIO | None) -> tuple[str, int]:
    """Return sha256 and size of a stream, and write it to `target`."""
    digest, size = hashlib.sha256(), 0
    while piece := source.read(PIECE_BYTES):
        digest.update(piece)
        size += len(piece)
        if target:
            target.write(piece)
    return digest.hexdigest(), size


def _restore_file(folder: Path, partial: Path, path: str, saved: SavedFile) -> None:
    where = PurePosixPath(path)
    if where.is_absolute() or ".." in where.parts or not where.parts:
        raise StoreError(f"restoring {path!r}: this path leads out of the home; take another backup")
    target = partial / where
    target.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    if not target.parent.resolve().is_relative_to(partial.resolve()):
        raise StoreError(f"restoring {path!r}: a link above it leads out of the home; take another backup")
    if saved.link is not None:
        target.symlink_to(saved.link)
        return
    try:
        with _blob(folder, saved.sha256).open("rb") as blob, target.open("xb") as stream:
            found = _copy(blob, stream)
            os.fsync(stream.fileno())
    except (FileNotFoundError, IsADirectoryError) as error:
        raise StoreError(f"restoring {path}: {error.filename} is missing; restore an earlier backup") from error
    if found != (saved.sha256, saved.size):
        raise StoreError(f"restoring {path}: its content in {folder} is damaged; restore an earlier backup")
    target.chmod(saved.mode & 0o777)
    os.utime(target, ns=(saved.mtime_ns, saved.mtime_ns))


def _blob(folder: Path, sha256: str) -> Path:
    return folder / BLOBS / sha256[:2] / sha256
