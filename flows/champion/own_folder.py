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

PREFIX = "serving-"
LOCK = "lock"


@contextmanager
def own_folder() -> Iterator[Path]:
    """Make the folder of this process, and remove it in the end."""
    servers = home() / "servers"
    servers.mkdir(parents=True, exist_ok=True)
    with (servers / "serving.lock").open("w") as makers:
        fcntl.flock(makers, fcntl.LOCK_EX)  # so that no folder is removed between its creation and its lock
        for left in servers.glob(f"{PREFIX}*/"):
            _remove_unless_locked(left)
        folder = TemporaryDirectory(prefix=PREFIX, dir=servers, ignore_cleanup_errors=True)
        lock = (Path(folder.name) / LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    # The lock is closed first, and the folder removed after it: in between, another process may remove it, too.
    with folder, lock:
        yield Path(folder.name)


def _remove_unless_locked(folder: Path) -> None:
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # its process is alive
            return
        shutil.rmtree(folder, ignore_errors=True)
