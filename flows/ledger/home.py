"""Where this project keeps what it makes: LIFECYCLE_HOME; by default `.lifecycle` in the current folder or above it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from flows.ledger.process_identity import boot_id
from stages.core.contract import StrictModel
from stages.core.errors import ResourceError

FOLDER = ".lifecycle"
REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT)


class HomeIdentity(StrictModel):
    """The folder of a home, as records name it: paths move, and a copy has the records of its original.

    Devices are numbered again at each boot, and by each host; elsewhere the inode alone tells homes apart.
    """

    boot: str
    device: int
    inode: int

    def is_here(self) -> bool:
        """Return whether it is this home."""
        try:
            here = home_identity()
        except FileNotFoundError:
            return False
        return self.inode == here.inode and (self.device == here.device or self.boot != here.boot)


def home() -> Path:
    """The folder of the store, the local servers and the ledgers of refreshes. It need not exist yet."""
    return Path(os.environ.get("LIFECYCLE_HOME", FOLDER)).absolute()


def home_identity() -> HomeIdentity:
    """Return which folder this home is. Raises `FileNotFoundError` as long as there is none."""
    status = home().stat()
    return HomeIdentity(boot=boot_id(), device=status.st_dev, inode=status.st_ino)


def home_above() -> dict[str, str]:
    """LIFECYCLE_HOME as a variable, where nobody set it and a folder above the current one has the project's home.

    Looks no further up than the root of a git checkout, and takes no folder of another user.
    """
    here = Path.cwd()
    if "LIFECYCLE_HOME" in os.environ or (here / FOLDER).is_dir():
        return {}
    for folder in (here, *here.parents):
        found = folder / FOLDER
        if found.is_dir() and found.stat().st_uid == os.getuid():
            return {"LIFECYCLE_HOME": str(found)}
        if (folder / ".git").exists():
            break
    return {}


def unusable(error: BaseException) -> ResourceError | None:
    """What to say when the system refused to read or write below the home; None for any other error."""
    if not (isinstance(error, OSError) and error.errno in REFUSALS and isinstance(error.filename, str)):
        return None
    if not Path(error.filename).absolute().is_relative_to(home()):
        return None
    remedy = "set LIFECYCLE_HOME to a folder that you may write to, or mend that one (see `lifecycle doctor`)"
    return ResourceError(f"using {error.filename}, below LIFECYCLE_HOME: {error.strerror}; {remedy}")


def store_root() -> Path:
    """Where artifacts are."""
    return home() / "store"


def hardware_file() -> Path:
    """The description of this machine's devices that predictions start from, if there is one."""
    return Path(os.environ.get("LIFECYCLE_HARDWARE", home() / "hardware.yaml")).absolute()


def ledger_root() -> Path:
    """Where the ledgers of refreshes are, a folder each."""
    return home() / "ledger"
