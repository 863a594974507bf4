"""Folder of one `serve --follow` for the temporary files of its engines: `<home>/servers/serving-…`.

Each new process removes the folders of killed ones. A folder is in use while its lock is held: the kernel releases a
lock with its process on every machine that shares the home, where process numbers mean nothing.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from flows.ledger.home import home
from stages.core.process_tree import working_directories

PREFIX = "serving-"
"""Folders of earlier versions have the label of an engine instead, and no lock."""
LOCK = "lock"


@contextmanager
def own_folder() -> Iterator[Path]:
    """Make the folder of this process, and remove it in the end."""
    servers = home() / "servers"
    servers.mkdir(parents=True, exist_ok=True)
    with (servers / "serving.lock").open("w") as makers:
        fcntl.flock(makers, fcntl.LOCK_EX)  # so that no folder is removed between its creation and its lock
        for left in servers.glob(f"{PREFIX}*/"):
            if not _is_locked(left):
                shutil.rmtree(left, ignore_errors=True)
        folder = TemporaryDirectory(prefix=PREFIX, dir=servers, ignore_cleanup_errors=True)
        lock = (Path(folder.name) / LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    # The lock is closed first, and the folder removed after it: in between, another process may remove it, too.
    with folder, lock:
        yield Path(folder.name)


def left_folders() -> Iterator[Path]:
    """Yield folders that no `serve --follow` uses any more, also those that earlier versions made for each engine."""
    in_use = working_directories()
    for folder in sorted((home() / "servers").glob("*/")):
        if folder.name.startswith(PREFIX):
            if not _is_locked(folder):
                yield folder
        elif folder.resolve() not in in_use:  # an engine works in its own
            yield folder


def _is_locked(folder: Path) -> bool:
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:  # its process is alive
        return True
    return False
