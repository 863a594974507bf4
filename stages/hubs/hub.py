"""What a hub does: say what a source holds now, and deliver it. One module a hub, one line in `registry.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stages.core.contract import StageContext
from stages.hubs.source import Source
from stages.remote.pointers import Pointer


@dataclass(frozen=True)
class Request:
    """Which files of a source to take. patterns: globs; None takes what a model or a dataset is made of.

    limit_s: of a question that is to be answered at once, or not at all: one attempt gets this long.
    """

    source: Source
    patterns: tuple[str, ...] | None = None
    trust_remote_code: bool = False
    limit_s: float | None = None


class Hub(Protocol):
    """Where models and datasets come from.

    Every method may ask the network, and raises DownloadError for what does not exist or may not be read, ModelError or
    DataError for what is no usable model or dataset, TransientError when the hub does not answer.
    """

    def resolve_revision(self, request: Request) -> str:
        """What the source holds now, as one string that changes if and only if its content does."""

    def deliver(self, request: Request, revision: str, folder: Path, context: StageContext) -> None:
        """Put the requested files of a resolved revision into `folder`, which does not exist yet, verified.

        Raises ResourceError when the disk is too small. What arrived of a delivery that failed may be kept in the
        context's scratch folder, for the next attempt.
        """

    def read_file(self, source: Source, revision: str, name: str) -> str | None:
        """The text of one small file of a resolved revision; None where there is no such file."""


class StreamingHub(Hub, Protocol):
    """A hub whose files can be read where they are."""

    def pointers(self, request: Request, revision: str) -> dict[str, Pointer]:
        """Name → pointer of each requested file of a resolved revision."""
