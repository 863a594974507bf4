"""Removal of files, links and folders, also of read-only or half removed folders."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import TracebackType

WRITABLE_FOLDER = 0o700


def remove_tree(path: Path) -> None:
    """Remove a file, a link (not its target), or a folder with all below it; fine when it is gone already.

    Raises OSError, with the path that could not be removed, after removing all else.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    elif any(isinstance(error, PermissionError) for error in _remove_folder(path)):
        make_writable(path)
        for error in _remove_folder(path):
            raise error


def make_writable(folder: Path) -> None:
    """Make a folder and all folders below it writable for their owner. Those of other users stay as they are."""
    if folder.is_symlink() or not folder.is_dir():
        return
    with suppress(OSError):
        folder.chmod(WRITABLE_FOLDER)
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                make_writable(Path(entry.path))


def _remove_folder(folder: Path) -> list[OSError]:
    """Remove what can be removed; return the errors of the rest, the innermost first."""
    errors: list[OSError] = []

    def note(_: object, failed: str, raised: tuple[type[BaseException], BaseException, TracebackType]) -> None:
        error = raised[1]
        assert isinstance(error, OSError)
        if not isinstance(error, FileNotFoundError):  # another process has removed it
            errors.append(OSError(error.errno, error.strerror, failed))

    shutil.rmtree(folder, onerror=note)
    return errors
