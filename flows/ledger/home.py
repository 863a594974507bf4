"""Lifecycle home: the folder of all data, `$LIFECYCLE_HOME` or by default `.lifecycle` in this or a parent folder."""

import errno
import os
import re
from pathlib import Path

from flows.ledger.process_identity import boot_id
from stages.core.contract import StrictModel
from stages.core.errors import ResourceError

FOLDER = ".lifecycle"
OF_STAGES = re.compile(r".*/(store/(\.work/)?[^/]+/[^/]+|ledger/[^/]+/trials/[^/]+)")
"""Path of a stage's files in a lifecycle home; the first group is its path within the home."""
REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT)


class HomeIdentity(StrictModel):
    """Identity of a lifecycle home's folder, recorded to tell later whether the home was copied or only moved.

    Device numbers change with each boot and host; then the inode alone tells homes apart.
    """

    boot: str
    device: int
    inode: int

    def is_here(self) -> bool:
        """Return whether this recorded identity is that of the lifecycle home that the process uses."""
        try:
            here = home_identity()
        except FileNotFoundError:
            return False
        return self.inode == here.inode and (self.device == here.device or self.boot != here.boot)


def home() -> Path:
    """Return the lifecycle home, which need not exist: the folder of artifacts, event logs and local servers."""
    return Path(os.environ.get("LIFECYCLE_HOME", FOLDER)).absolute()


def home_identity() -> HomeIdentity:
    """Return this lifecycle home's identity, by which copies are noticed. Raises `FileNotFoundError` without a home."""
    status = home().stat()
    return HomeIdentity(boot=boot_id(), device=status.st_dev, inode=status.st_ino)


def home_above() -> dict[str, str]:
    """Return LIFECYCLE_HOME for a home in a parent folder, as environment; {} if none is needed or found.

    Looks no further up than the root of a git checkout, and ignores folders of other users.
    """
    here = Path.cwd()
    if "LIFECYCLE_HOME" in os.environ or (here / FOLDER).is_dir():
        return {}
    for folder in (here, *here.parents):
        candidate = folder / FOLDER
        if candidate.is_dir() and candidate.stat().st_uid == os.getuid():
            return {"LIFECYCLE_HOME": str(candidate)}
        if (folder / ".git").exists():
            break
    return {}


def unusable(error: BaseException) -> ResourceError | None:
    """Return the error to show when the lifecycle home could not be read or written; None for other exceptions."""
    if not (isinstance(error, OSError) and error.errno in REFUSALS and isinstance(error.filename, str)):
        return None
    if not Path(error.filename).absolute().is_relative_to(home()):
        return None
    remedy = "set LIFECYCLE_HOME to a folder that you may write to, or fix that one (see `lifecycle doctor`)"
    return ResourceError(f"using {error.filename}, below LIFECYCLE_HOME: {error.strerror}; {remedy}")


def store_root() -> Path:
    """Return the folder of the artifact store in the lifecycle home."""
    return home() / "store"


def hardware_file() -> Path:
    """Return the path of the file that describes this machine's devices to the layout planner; it may not exist."""
    return Path(os.environ.get("LIFECYCLE_HARDWARE", home() / "hardware.yaml")).absolute()


def ledger_root() -> Path:
    """Return the folder of all refreshes' event logs (ledgers), one subfolder for each refresh."""
    return home() / "ledger"


def in_this_home(folder: Path) -> Path:
    """Return where a folder of a stage's files, as an event log names it, is now: a home may have been moved or copied.

    Event logs name folders by absolute paths, also of a home's former place; those from a shared store by paths
    relative to the home. A folder that is not in this home, or no
    longer there, is returned as it is.
    """
    if not folder.is_absolute():
        return home() / folder
    if folder.is_relative_to(home()) or not (match := OF_STAGES.fullmatch(str(folder))):
        return folder
    here = home() / match[1]
    return here if here.exists() else folder
