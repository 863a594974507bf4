"""Protocol that every publishing target implements, with its address and file types."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stages.hubs.listing import Digest


@dataclass(frozen=True)
class Address:
    """Address of a publishing target, parsed from a recipe. scheme: key of the registry. place: text after it."""

    scheme: str
    place: str
    is_hub: bool = False

    def __str__(self) -> str:
        return f"{self.scheme}://{self.place}"


@dataclass(frozen=True)
class LocalFile:
    """Local file to be published, with its size and sha256 (hex digits)."""

    path: Path
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class TargetContents:
    """Files that a publishing target holds.

    files: name → digest; None for one that cannot be the expected one, so that it was not hashed. revision: the
    target's own name for this content, if any.
    """

    files: Mapping[str, Digest | None]
    revision: str | None = None


LocalFiles = Mapping[str, LocalFile]
Names = Collection[str]
Sent = Callable[[int], None]
"""Callback for the progress of publishing: gets the number of bytes that were just sent."""


class Target(Protocol):
    """Protocol of a publishing target; credentials are read from the environment.

    Every method raises PublishError if the target refuses, TransientError if it does not answer.
    """

    def check(self) -> None:
        """Check that the publishing target accepts files, without changing anything there."""

    def prepare(self, licence: str | None) -> None:
        """Create the missing repository or folder, private if asked; a new repository may have to state `licence`."""

    def held(self, expected: LocalFiles) -> TargetContents:
        """Return the publishing target's files with checksums, as stated there or as computed from their content."""

    def read_text(self, name: str) -> str | None:
        """Return the text of a small published file, such as an earlier publication's list of checksums."""

    def send(self, files: LocalFiles, missing: Names, stale: Names, sent: Sent) -> None:
        """Upload `missing` files to the publishing target, and delete `stale` ones there (both names).

        Files that were sent before an interruption are found by checksum, and not sent again.
        """
