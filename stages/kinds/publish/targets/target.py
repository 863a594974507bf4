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
    """scheme: of the registry. place: what follows it, as its pattern has it."""

    scheme: str
    place: str
    is_hub: bool = False

    def __str__(self) -> str:
        """As a recipe writes it."""
        return f"{self.scheme}://{self.place}"


@dataclass(frozen=True)
class LocalFile:
    """A file to be published. sha256: hex digits."""

    path: Path
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Held:
    """What lies at a target: name → digest; None for what cannot be the expected file, so that nobody hashed it.

    revision: what the target calls this content, if it has a word for it.
    """

    files: Mapping[str, Digest | None]
    revision: str | None = None


LocalFiles = Mapping[str, LocalFile]
"""By their names at the target."""
Names = Collection[str]
Sent = Callable[[int], None]
"""Gets bytes as they are done."""


class Target(Protocol):
    """A place that was named with its credentials in the environment.

    Every method may ask the network, and raises PublishError for what is refused, TransientError when nobody answers.
    """

    def check(self) -> None:
        """Find out whether it can be published to, without changing anything there."""

    def prepare(self, licence: str | None) -> None:
        """Make the repository or folder, unless it is there. Private, where that is for us to say.

        licence: of what will be published, as its card says it, where a new repository has to state one.
        """

    def held(self, expected: LocalFiles) -> Held:
        """What is there, by checksums that the target computed or that are computed of what it gives back."""

    def read_text(self, name: str) -> str | None:
        """The text of one small file of `held`, that an earlier publication left."""

    def send(self, files: LocalFiles, missing: Names, stale: Names, sent: Sent) -> None:
        """Put the `missing` of `files` there, and take the `stale` names away.

        What was sent before a cut is found by its checksum, and not sent again.
        """
