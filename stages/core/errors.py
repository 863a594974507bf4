"""Error classes for expected errors, each with an exit code that stage processes and `lifecycle` share.

A message says what was being done, what was found, what was expected, and what to do next. Any other exception is a bug
of ours and exits with `INTERNAL_ERROR`.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.core.redaction import redact

INTERNAL_ERROR = 70
USAGE_ERROR = 2


class LifecycleError(Exception):
    """Base of all expected errors; secrets are removed from their messages, which go to logs and terminals."""

    exit_code = INTERNAL_ERROR

    def __init__(self, message: str = "", *, died: bool = False) -> None:
        """Create the error, without secrets. died: an unrequested signal killed a process of the stage or server."""
        super().__init__(redact(message))
        self.died = died

    def add(self, sentence: str) -> None:
        first, newline, rest = str(self).partition("\n")
        self.args = (f"{first}; {redact(sentence)}{newline}{rest}",)


class RecipeError(LifecycleError):
    """The recipe is invalid."""

    exit_code = 3


class LayoutError(RecipeError):
    """The parallel degrees do not fit the model, the batch or the number of processes."""

    exit_code = 4


class DataError(LifecycleError):
    """A dataset is missing, empty, malformed, or has nothing to learn from."""

    exit_code = 5


class ModelError(LifecycleError):
    """A model folder is incomplete, damaged, unsafe, or not of a supported kind."""

    exit_code = 6


class DownloadError(LifecycleError):
    """A source does not exist, may not be read, or sent something else than it promised."""

    exit_code = 7


class ResourceError(LifecycleError):
    """Disk, memory, a device or a port that is needed is not available."""

    exit_code = 8


class ServerError(LifecycleError):
    """A server did not start, ended, or answers wrongly."""

    exit_code = 9


class EvaluationError(LifecycleError):
    """A benchmark could not be run, or gave no scores."""

    exit_code = 10


class GateError(LifecycleError):
    """The stage did its work, but its result misses a bound that the recipe sets."""

    exit_code = 11


class StoreError(LifecycleError):
    """An artifact is damaged, or the store cannot be read or written."""

    exit_code = 12


class StageTimeoutError(LifecycleError):
    """A stage ran longer than the recipe allows."""

    exit_code = 13


class StageCrashError(LifecycleError):
    """A stage process was killed, or ended without an error message."""

    exit_code = 14


class RefreshStoppedError(LifecycleError):
    """The refresh was stopped before its stages were done."""

    exit_code = 15


class TrainingError(LifecycleError):
    """The training diverged: the loss or the gradient norm is no longer a finite number."""

    exit_code = 16


class NotPromotedError(LifecycleError):
    """The refresh is complete, but its candidate missed a gate of promotion: the champion stays."""

    exit_code = 17


class WaitingForApprovalError(LifecycleError):
    """The refresh is complete, but its candidate waits for a person's approval: the champion stays."""

    exit_code = 19


class ApprovalError(LifecycleError):
    """A person may not decide about a champion, or there is nothing to decide."""

    exit_code = 20


class PublishError(LifecycleError):
    """A model could not be published: the target refused it, or what the target holds differs from what was sent."""

    exit_code = 18


class TransientError(LifecycleError):
    """Something that may well work when tried again: a network fault, a busy server."""

    exit_code = 75


class OutdatedVerdictError(TransientError):
    """Another model became champion after the candidate was compared with the former one: compare it again."""

    exit_code = 76


@contextmanager
def full_disk_named(doing: str, where: Path) -> Iterator[None]:
    """Turn the operating system's "disk full" error, raised in the `with` block, into a `ResourceError`."""
    try:
        yield
    except Exception as error:
        if not is_full_disk(error):
            raise
        raise ResourceError(full_disk_message(doing, where)) from error


def is_full_disk(error: Exception) -> bool:
    """Return whether an error means that a disk is full; safetensors only quotes the system's message."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return not isinstance(error, LifecycleError) and os.strerror(errno.ENOSPC) in str(error)


def full_disk_message(doing: str, where: Path) -> str:
    """Return the error message for a full disk. where: a path on the disk, which need not exist."""
    disk = os.statvfs(next(path for path in (where, *where.absolute().parents) if path.exists()))
    free = f"{disk.f_bavail * disk.f_frsize / 2**20:.1f} MiB are free now"
    # A disk may run out of inodes while bytes are free; some file systems count none (0).
    if disk.f_files and not disk.f_favail:
        free += ", but no file more fits"
    return (
        f"{doing}: the disk of {where} is full ({free}); free some space, for instance with `lifecycle gc`, and run "
        "again"
    )


def error_classes() -> dict[str, type[LifecycleError]]:
    """Return all error classes that have an exit code of their own, by name."""
    classes: dict[str, type[LifecycleError]] = {}
    todo: list[type[LifecycleError]] = [LifecycleError]
    while todo:
        error = todo.pop()
        if "exit_code" in vars(error):
            classes[error.__name__] = error
        todo += error.__subclasses__()
    return classes


def class_name(error: Exception) -> str:
    """Return the name of an error's nearest class that has an exit code; other processes know no other classes."""
    return next((one.__name__ for one in type(error).__mro__ if "exit_code" in vars(one)), type(error).__name__)
