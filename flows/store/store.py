"""Store of artifacts on disk. Only this module, and stages in their work folders, write below its root.

    <kind>/<stage>-<version>/           an artifact, if its record.json is complete
    .work/<kind>/<stage>-<resume key>/  work in progress; survives a crash
    .cache/<kind>/                      kept between runs, keyed by content
    .locks/                             one file a resume key; the kernel releases the lock of a dead process
    .trash/                             being removed; nothing reads it

A commit renames the work folder and then renames `record.json` into it, so an artifact is complete or does not exist.
"""

import contextlib
import errno
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout
from pydantic import ValidationError

from flows.ledger.home import HomeIdentity
from flows.ledger.process_identity import boot_id
from flows.store.content import (
    ATTEMPT_FILE,
    LAUNCH_FOLDER,
    PENDING_HOOK_FILE,
    PENDING_RECORD_FILE,
    RECORD_FILE,
    SCRATCH_FOLDER,
    damage_of,
    is_pending,
)
from flows.store.record import Artifact, Index, Record
from flows.store.remote import SETTING_FILE, Remote, read_setting
from stages.core.errors import StoreError, full_disk_named
from stages.core.fields import Product
from stages.core.files import write_atomically

WRITABLE_FOLDER = 0o700
LOCK_INTERVAL_S = 0.2
PRIVATE_FOLDER = 0o700
TRASH = ".trash"


def remove_tree(path: Path) -> None:
    """Remove a file, a link (not its target) or a whole folder; do nothing when it is absent.

    Raises OSError, with the path that could not be removed, after removing all else.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    # A folder that its owner may not write to keeps its entries; the second pass raises what is still in the way.
    elif any(isinstance(error, PermissionError) for error in _remove_folder(path)):
        make_writable(path)
        for error in _remove_folder(path):
            raise error


def make_writable(folder: Path) -> None:
    """Make a folder and all below it writable for their owner, to remove them; other users' folders stay."""
    if folder.is_symlink() or not folder.is_dir():
        return
    with suppress(OSError):
        folder.chmod(WRITABLE_FOLDER)
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                make_writable(Path(entry.path))


def _remove_folder(folder: Path) -> list[OSError]:
    """Remove a folder as far as possible; return the errors for what remains, the innermost first."""
    errors: list[OSError] = []

    def note(_: object, failed: str, raised: tuple[type[BaseException], BaseException, TracebackType]) -> None:
        error = raised[1]
        assert isinstance(error, OSError)
        if not isinstance(error, FileNotFoundError):  # another process has removed it
            errors.append(OSError(error.errno, error.strerror, failed))

    shutil.rmtree(folder, onerror=note)
    return errors


class Store:
    """Store of artifacts below the folder `root`, which is created by the first write."""

    def __init__(self, root: Path):
        self.root = root.absolute()

    @cached_property
    def remote(self) -> Remote | None:
        """Return the shared store that the setting beside the store's folder names; None without the setting."""
        address = read_setting(self.root.parent / SETTING_FILE)
        return Remote(address) if address else None

    def identity(self) -> HomeIdentity:
        """Return the identity by which other homes with the same shared store know this one."""
        status = self.make_folder(self.root).stat()
        return HomeIdentity(boot=boot_id(), device=status.st_dev, inode=status.st_ino)

    def folder_of(self, kind: str, stage: str, version: str) -> Path:
        """Return the folder of an artifact by kind, stage name and version; it need not exist."""
        return self.root / kind / f"{stage}-{version}"

    def work_folder(self, kind: str, stage: str, resume_key: str) -> Path:
        """Return the work folder of a stage, which the store later takes over as the artifact; it need not exist."""
        return self.root / ".work" / kind / f"{stage}-{resume_key}"

    def cache_folder(self, kind: str) -> Path:
        """Return the cache folder that all stages of a kind share from run to run."""
        return self.root / ".cache" / kind

    def find(self, kind: str, version: str) -> Artifact | None:
        """Return the finished artifact of a stage kind and a version (cache key); None when there is none."""
        # Whatever the stage was called: another recipe, or an older name, may have built it.
        candidates = (self.root / kind).glob(f"*-{version}")
        return next((artifact for folder in candidates if (artifact := read_artifact(folder))), None)

    def index(self) -> Index:
        """Return the index of all artifacts in the store now."""
        return _StoreIndex(self.root)

    def make_folder(self, folder: Path) -> Path:
        """Create a folder in the store, readable only by its owner."""
        with self.explained(f"create {folder}"):
            self.root.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        return folder

    @contextmanager
    def lock(self, kind: str, resume_key: str, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold a resume key's lock; call `waiting`, which may raise, every 0.2 s while another process holds it."""

        def give_up() -> bool:
            waiting()
            return False

        lock = self._lock_of(kind, resume_key)
        with self.explained(f"lock {lock.lock_file}"):
            self.make_folder(self.root / ".locks")
            # The check never cancels: only an exception of `waiting` ends the wait.
            held = lock.acquire(poll_interval=LOCK_INTERVAL_S, cancel_check=give_up)
        with held:
            yield

    def is_locked(self, kind: str, resume_key: str) -> bool:
        """Return whether some process holds the lock for building an artifact at this moment."""
        lock = self._lock_of(kind, resume_key)
        # Taking the lock would make the file.
        if not Path(lock.lock_file).exists():
            return False
        try:
            with lock.acquire(blocking=False):
                return False
        except Timeout:
            return True

    def _lock_of(self, kind: str, resume_key: str) -> FileLock:
        # On file systems without locks, filelock's fallback would outlive a holder that dies.
        return FileLock(self.root / ".locks" / f"{kind}-{resume_key}", fallback_to_soft=False)

    def commit(self, work: Path, record: Record) -> Artifact:
        """Move a finished work folder into the store as the artifact that `record` describes.

        It replaces an older artifact of the same version. Scratch is removed last, so that a crash before costs no
        work.
        """
        folder = self.folder_of(record.kind, record.stage, record.version)
        with self.explained(f"commit {folder.name}"):
            # In the work folder, under another name: the rename below brings it along, and `recover` finds it.
            write_atomically(work / PENDING_RECORD_FILE, record.model_dump_json(indent=1))
            # Before the rename: after a power failure, an artifact must not have files that never reached the disk.
            _sync_tree(work)
            shutil.rmtree(work / SCRATCH_FOLDER, ignore_errors=True)
            shutil.rmtree(work / LAUNCH_FOLDER, ignore_errors=True)
            (work / ATTEMPT_FILE).unlink(missing_ok=True)
            self.make_folder(folder.parent)
            # An older artifact of this version goes first: a rename onto a folder that is not empty fails.
            replaced = [self._to_trash(old) for old in folder.parent.glob(f"*-{record.version}")]
            work.rename(folder)
            # The parent holds the folder's new name.
            _sync(folder.parent)
            # Only now is it an artifact. After a crash before this line, `recover` does it.
            _finish_commit(folder)
            # These lie in the trash: a crash from here on leaves them to the garbage collection.
            for old in replaced:
                remove_tree(old)
        artifact = read_artifact(folder)
        assert artifact is not None
        return artifact

    def recover(self, kind: str, version: str) -> None:
        """Complete an artifact, under its lock, that a crash left without a record in the store."""
        for folder in (self.root / kind).glob(f"*-{version}"):
            if (folder / PENDING_RECORD_FILE).exists() and not (folder / RECORD_FILE).exists():
                _finish_commit(folder)

    def remove_mark(self, artifact: Path) -> None:
        """Remove the mark of an artifact whose follow-up program, such as registration in MLflow, has now run."""
        with self.explained(f"note that {artifact.name} is complete"):
            (artifact / PENDING_HOOK_FILE).unlink()
            _sync(artifact)

    def remove(self, path: Path) -> None:
        """Remove a folder, a file or a link of the store at once, by moving it to the trash first.

        Raises StoreError when something below it cannot be removed: what is left then lies in the trash.
        """
        with self.explained(f"remove {path}"), contextlib.suppress(FileNotFoundError):
            try:
                remove_tree(path if path.parent == self.root / TRASH else self._to_trash(path))
            except OSError as error:
                # A full disk may have no room for the rename; a path outside the store may be on another disk.
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EXDEV):
                    raise
                remove_tree(path)

    def note_use(self, artifact: Artifact) -> None:
        """Record that an artifact was used from the cache, so that garbage collection counts it as recently used."""
        with contextlib.suppress(OSError):
            os.utime(artifact.folder / RECORD_FILE)

    def _to_trash(self, path: Path) -> Path:
        for folder in (self.root, self.root / TRASH):
            folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        trash = self.root / TRASH / f"{path.name}-{os.urandom(4).hex()}"
        try:
            return path.rename(trash)
        except PermissionError:  # renaming a folder into another parent needs write permission on it
            make_writable(path)
            return path.rename(trash)

    @contextmanager
    def explained(self, doing: str) -> Iterator[None]:
        """Turn errors of the file system into `ResourceError` (for a full disk) or `StoreError` (for others)."""
        try:
            with full_disk_named(f"cannot {doing}", self.root):
                yield
        except OSError as error:
            raise StoreError(f"cannot {doing}: {error.strerror} ({error.filename or self.root})") from error


class _StoreIndex(Index):
    """Index that reads records on demand: a plan needs few of the thousand artifacts of a home after a year."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        # Without `.work`, `.cache`, `.locks` and `.trash`.
        self._folders = sorted(root.glob("[!.]*/*/"))
        self._read: dict[Path, Artifact | None] = {}
        self._by_version: dict[tuple[str, str], list[Path]] = defaultdict(list)
        self._by_stage: dict[tuple[str, str], list[Path]] = defaultdict(list)
        for folder in self._folders:
            kind, (stage, _, version) = folder.parent.name, folder.name.rpartition("-")
            self._by_version[kind, version].append(folder)
            self._by_stage[kind, stage].append(folder)

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        return tuple(self._artifacts_in(self._folders))

    @property
    def leftovers(self) -> tuple[Path, ...]:
        read = {artifact.folder for artifact in self.artifacts}
        return tuple(folder for folder in self._folders if folder not in read)

    def find(self, kind: str, version: str) -> Artifact | None:
        # Whatever the stage was called: see `Store.find`.
        return next(self._artifacts_in(self._by_version[kind, version]), None)

    def of_stage(self, kind: str, stage: str) -> Iterator[Artifact]:
        return self._artifacts_in(self._by_stage[kind, stage])

    def of_product(self, product: Product) -> list[Artifact]:
        from stages.kinds.registry import makes  # the configs of all kinds; most users of a store need none

        found = self._artifacts_in(folder for folder in self._folders if makes(folder.parent.name, product))
        return [one for one in found if one.record.product == product]

    def _artifacts_in(self, folders: Iterable[Path]) -> Iterator[Artifact]:
        """Yield the artifacts in those of the folders that have a complete record; each record is read once."""
        for folder in folders:
            if folder not in self._read:
                self._read[folder] = read_artifact(folder)
            if artifact := self._read[folder]:
                yield artifact


def read_artifact(folder: Path) -> Artifact | None:
    """Return the artifact in a folder; None when its record is missing, incomplete or of a newer schema."""
    path = folder / RECORD_FILE
    try:
        record = Record.model_validate_json(path.read_bytes())
        # The time of the record file, which `note_use` renews, is that of the last use.
        return Artifact(folder, record, path.stat().st_mtime, damage_of(folder, record.files), is_pending(folder))
    except (OSError, ValidationError):
        return None


def _finish_commit(folder: Path) -> None:
    (folder / PENDING_RECORD_FILE).replace(folder / RECORD_FILE)
    _sync(folder)


def _sync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for file in files:
            _sync(Path(parent, file))
        _sync(Path(parent))


def _sync(path: Path) -> None:
    # To be read only: folders cannot be opened otherwise.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
