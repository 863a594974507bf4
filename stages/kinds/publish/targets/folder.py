"""Publishing target in a folder (`file:///PATH`), such as a network share; a file appears only once it is complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stages.core.errors import PublishError, full_disk_named
from stages.core.hashing import sha256_of_files
from stages.hubs.listing import Digest
from stages.kinds.publish.targets.target import Address, LocalFiles, Names, Sent, TargetContents

PARTIAL_SUFFIX = ".partial"
CHUNK_BYTES = 8 << 20


def check_outside(folder: Path, store: Path) -> None:
    """Raise PublishError for a folder in or around the artifact store (links followed), which it could overwrite."""
    folder, store = folder.resolve(), store.resolve()
    is_inside = any(path == store or _is_same(path, store) for path in (folder, *folder.parents))
    if is_inside or store.is_relative_to(folder):
        how = "lies in" if is_inside else "holds"
        raise PublishError(
            f"publishing to file://{folder}: that folder {how} the store ({store}), whose artifacts nothing may "
            "change; name a folder outside it"
        )


def _is_same(path: Path, other: Path) -> bool:
    with suppress(OSError):  # one of them does not exist
        return path.samefile(other)
    return False


class Folder:
    """Publishing target in a folder, whose files are hashed whenever its content is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self) -> None:
        with self._explained():
            nearest = next(path for path in (self._folder, *self._folder.parents) if path.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise PublishError(
                f"publishing to file://{self._folder}: {nearest} is no folder that can be written to; "
                "name another one, or change its permissions"
            )

    def prepare(self, licence: str | None) -> None:
        with self._explained():
            self._folder.mkdir(parents=True, exist_ok=True)

    def held(self, expected: LocalFiles) -> TargetContents:
        with self._explained():
            found = {path.relative_to(self._folder).as_posix(): path for path in self._folder.rglob("*")}
            files = {name: path for name, path in found.items() if path.is_file()}
            same_size = {
                name for name in files.keys() & expected if files[name].stat().st_size == expected[name].size_bytes
            }
            sums = sha256_of_files({name: files[name] for name in same_size})
        return TargetContents({name: Digest("sha256", sums[name]) if name in sums else None for name in files})

    def read_text(self, name: str) -> str | None:
        with self._explained():
            return (self._folder / name).read_text(encoding="utf-8", errors="replace")

    def send(self, files: LocalFiles, missing: Names, stale: Names, sent: Sent) -> None:
        with self._explained():
            for name in missing:
                self._copy(files[name].path, self._folder / name)
                sent(files[name].size_bytes)
            for name in stale:
                (self._folder / name).unlink(missing_ok=True)

    def _copy(self, source: Path, target: Path) -> None:
        if not target.parent.resolve().is_relative_to(self._folder.resolve()):
            raise PublishError(
                f"publishing to file://{self._folder}: {target.parent} leads out of that folder by a link; remove the "
                "link, or name another folder"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}{PARTIAL_SUFFIX}")
        # Others may write there: a link of that name is removed, and none that is made meanwhile is followed ("x").
        partial.unlink(missing_ok=True)
        with source.open("rb") as content, partial.open("xb") as copy:
            shutil.copyfileobj(content, copy, CHUNK_BYTES)
        partial.replace(target)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        doing = f"publishing to file://{self._folder}"
        try:
            with full_disk_named(doing, self._folder):
                yield
        except OSError as error:
            raise PublishError(f"{doing}: {error}; change its permissions, or name another folder") from error


def open_target(address: Address, *, private: bool) -> Folder:
    """Open a folder as publishing target. The folder's owner decides who may read it, whatever `private` says."""
    return Folder(Path(address.place))
