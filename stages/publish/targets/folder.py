"""A folder (`file:///PATH`), such as one of a file server: each file appears whole, under its own name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.core.errors import PublishError, full_disk_named
from stages.core.hashing import sha256_of_files
from stages.hubs.verification import Digest
from stages.publish.targets.address import Address
from stages.publish.targets.target import Held, LocalFiles, Names, Sent

PARTIAL_SUFFIX = ".partial"


class Folder:
    """What is there is hashed again each time it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self) -> None:
        nearest = next(path for path in (self._folder, *self._folder.parents) if path.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            raise PublishError(
                f"publishing to file://{self._folder}: {nearest} is no folder that can be written to; "
                "name another one, or change its permissions"
            )

    def prepare(self, licence: str | None) -> None:
        with self._explained():
            self._folder.mkdir(parents=True, exist_ok=True)

    def held(self, expected: LocalFiles) -> Held:
        with self._explained():
            found = {path.relative_to(self._folder).as_posix(): path for path in self._folder.rglob("*")}
            files = {name: path for name, path in found.items() if path.is_file()}
            alike = {
                name for name in files.keys() & expected if files[name].stat().st_size == expected[name].size_bytes
            }
            sums = sha256_of_files({name: files[name] for name in alike})
        return Held({name: Digest("sha256", sums[name]) if name in sums else None for name in files})

    def read_text(self, name: str) -> str | None:
        return (self._folder / name).read_text(encoding="utf-8", errors="replace")

    def send(self, files: LocalFiles, missing: Names, stale: Names, sent: Sent) -> None:
        with self._explained():
            for name in missing:
                self._copy(files[name].path, self._folder / name)
                sent(files[name].size_bytes)
            for name in stale:
                (self._folder / name).unlink(missing_ok=True)

    def _copy(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}{PARTIAL_SUFFIX}")
        shutil.copyfile(source, partial)
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
    """Who may read the folder is its owner's to say, whatever `private` says."""
    return Folder(Path(address.place))
