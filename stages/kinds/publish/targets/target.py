"""Protocol of a publishing target, with its address and the files it takes.

A new kind of target is a module here and a line in `registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stages.hubs.listing import Digest


@dataclass(frozen=True)
class Address:
    """Parsed address of a target.

    scheme: key of the registry.
    place: text after the scheme.
    """

    scheme: str
    place: str
    is_hub: bool = False

    def __str__(self) -> str:
        """Return the address as a recipe writes it."""
        return f"{self.scheme}://{self.place}"


@dataclass(frozen=True)
class LocalFile:
    """A file to be published. sha256: hex digits."""

    path: Path
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Held:
    """Files that a publishing target holds.

    files: name → digest; None for a file that cannot be the expected one, so that it was not hashed.
    revision: the target's own name for this content, if it has one.
    """

    files: Mapping[str, Digest | None]
    revision: str | None = None


LocalFiles = Mapping[str, LocalFile]
"""Files to be published, by the names that they get at the target."""
Names = Collection[str]
Sent = Callable[[int], None]
"""Callback that gets numbers of bytes as they are sent."""


class Target(Protocol):
    """Protocol of a publishing target, whose credentials are in the environment.

    Every method may ask the network, and raises PublishError if the target refuses, TransientError if it does not
    answer.
    """

    def check(self) -> None:
        """Check that the target can be published to, without changing anything there."""

    def prepare(self, licence: str | None) -> None:
        """Create the repository or folder if it does not exist; private where we decide that.

        licence: of the publication, as its card states it; a new repository may have to state one.
        """

    def held(self, expected: LocalFiles) -> Held:
        """Return the target's files with checksums, which it computed, or which are computed from what it returns."""

    def read_text(self, name: str) -> str | None:
        """Return the text of one small file of `held` that an earlier publication left."""

    def send(self, files: LocalFiles, missing: Names, stale: Names, sent: Sent) -> None:
        """Send the `missing` of `files` to the target, and remove the `stale` names there.

        Files that were sent before an interruption are found by checksum, and not sent again.
        """
