"""Interface of hubs (where models and datasets are downloaded from), and parsers of the sources in a recipe.

Each hub is a module with one line in `registry.py`. A `parse_…` function reads one way of writing a source, the text
after the hub's prefix, and raises ValueError.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from stages.core.contract import StageContext
from stages.remote.pointers import Pointer

_PART = r"(?!\.+(?:[/@]|$))[\w.-]+"  # `..` is a path
_REPOSITORY = re.compile(rf"(?P<name>{_PART}/{_PART})(?:@(?P<revision>[\w./-]+))?")


Product = Literal["model", "dataset"]


class Hub(Protocol):
    """Interface of a hub, which finds the current revision of a model or dataset and downloads its files.

    Methods may ask the network, and raise DownloadError for what does not exist or may not be read, ModelError or
    DataError for an unusable model or dataset, TransientError when the hub does not answer.
    """

    def resolve_revision(self, request: Request) -> str:
        """Return the current revision of a model or dataset, which changes exactly when its content does."""

    def deliver(self, request: Request, revision: str, folder: Path, context: StageContext) -> None:
        """Download the requested files of a revision into `folder`, which must not exist yet, and verify them.

        Raises ResourceError when the disk is too small. Arrived parts may stay in the scratch folder.
        """

    def read_file(self, source: Source, revision: str, name: str) -> str | None:
        """Return the text of a small file of a model or dataset at a revision; None if there is no such file."""


class StreamingHub(Hub, Protocol):
    """Interface of a hub whose datasets can also be read remotely, without downloading them."""

    def pointers(self, request: Request, revision: str) -> dict[str, Pointer]:
        """Return the address, size and tag (`Pointer`) of each requested file of a dataset at a revision, by name."""


@dataclass(frozen=True)
class Request:
    """Request for some files of a model or dataset: its source, and the patterns of the files' names.

    patterns: globs; None takes the usual files. with_media: media of a dataset, too. limit_s: of a single attempt,
    where an answer is needed at once.
    """

    source: Source
    patterns: tuple[str, ...] | None = None
    trust_remote_code: bool = False
    with_media: bool = False
    limit_s: float | None = None


@dataclass(frozen=True)
class Source:
    """Source of a model or dataset as a recipe names it, parsed into hub, name and revision.

    hub: in the registry. name: the hub's (`org/name`, a path, a builtin's name). place: the part of the identity that a
    resolved revision does not cover. revision: branch, tag or commit; None: default branch.
    """

    hub: str
    product: Product
    name: str
    place: str
    revision: str | None = None

    def __str__(self) -> str:
        if self.place.endswith("://"):
            return f"{self.place}{self.name}"
        return f"{self.place}@{self.revision}" if self.revision else self.place


def repository(hub: str, product: Product, name: str, revision: str | None = None) -> Source:
    """Return the source for a model or dataset repository on a hub such as Hugging Face."""
    return Source(hub, product, name, f"{hub}://{'datasets/' if product == 'dataset' else ''}{name}", revision)


def parse_repository(hub: str, rest: str, product: Product) -> Source:
    """Parse the name of a repository on a hub: `[datasets/]org/name[@revision]`."""
    is_dataset = rest.startswith("datasets/")
    match = _REPOSITORY.fullmatch(rest.removeprefix("datasets/"))
    if match is None or is_dataset != (product == "dataset"):
        raise ValueError(f"{hub}://{rest} is no {product} repository")
    return repository(hub, product, match["name"], match["revision"])


def parse_path(hub: str, rest: str, product: Product) -> Source:
    """Parse a `file://` source in a recipe. The content of the files identifies the artifact, not the path."""
    if not rest:
        raise ValueError(f"{hub}:// needs a path, absolute or relative to the recipe")
    return Source(hub, product, rest, f"{hub}://")


def parse_object(hub: str, rest: str, product: Product) -> Source:
    """Parse an object-storage source: a bucket with an object's path, or a prefix; the content identifies it."""
    name = rest.rstrip("/")
    if not re.fullmatch(r"[a-z0-9][\w.-]+(/[^/]+)*", name) or {".", ".."} & set(name.split("/")):
        raise ValueError(f"{hub}://{rest} is no bucket, nor a path in one")
    return Source(hub, product, name, f"{hub}://")


def parse_stored(hub: str, rest: str, product: Product) -> Source:
    """Parse a recipe's name of an artifact in the store: a stage, maybe with a version, or an adopted artifact."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", rest):
        raise ValueError(f"{rest!r} is no name of an artifact")
    place = {"store": "store://", "adopted": "adopted:"}[hub]
    return Source(hub, product, rest, f"{place}{rest}")


def parse_champion(hub: str, rest: str, product: Product) -> Source:
    """Parse a recipe's name of a registered model with an alias, `NAME@ALIAS`, such as `chat@champion`."""
    if product != "model" or not re.fullmatch(r"[^/@]+@[^/@]+", rest):
        raise ValueError(f"models:/{rest} is no registered {product}")
    return Source(hub, product, rest, f"models:/{rest}")
