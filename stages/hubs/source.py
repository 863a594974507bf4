"""What a recipe's `model` or `dataset` names, parsed: which hub, and what of it. Light and pure.

Each function here reads one way of writing a source, what comes after the hub's prefix, and raises ValueError.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Product = Literal["model", "dataset"]

_PART = r"(?!\.+(?:[/@]|$))[\w.-]+"  # `..` is a path
_REPOSITORY = re.compile(rf"(?P<name>{_PART}/{_PART})(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class Source:
    """A model or dataset of a hub.

    hub: its name in the registry. name: what the hub knows it by (`org/name`, a path, a builtin's name). place: where
    it comes from, without what a resolved revision says better: part of the identity. revision: branch, tag or commit;
    None is the hub's default branch.
    """

    hub: str
    product: Product
    name: str
    place: str
    revision: str | None = None

    def __str__(self) -> str:
        """As a recipe writes it."""
        if self.place.endswith("://"):
            return f"{self.place}{self.name}"
        return f"{self.place}@{self.revision}" if self.revision else self.place


def repository(hub: str, product: Product, name: str, revision: str | None = None) -> Source:
    """A repository of a model hub."""
    return Source(hub, product, name, f"{hub}://{'datasets/' if product == 'dataset' else ''}{name}", revision)


def parse_repository(hub: str, rest: str, product: Product) -> Source:
    """`[datasets/]org/name[@revision]`."""
    is_dataset = rest.startswith("datasets/")
    match = _REPOSITORY.fullmatch(rest.removeprefix("datasets/"))
    if match is None or is_dataset != (product == "dataset"):
        raise ValueError(f"{hub}://{rest} is no {product} repository")
    return repository(hub, product, match["name"], match["revision"])


def parse_path(hub: str, rest: str, product: Product) -> Source:
    """A path, absolute or relative to the recipe. Its content is what counts, so the place is any."""
    if not rest:
        raise ValueError(f"{hub}:// needs a path, absolute or relative to the recipe")
    return Source(hub, product, rest, f"{hub}://")


def parse_object(hub: str, rest: str, product: Product) -> Source:
    """A bucket, and the path of an object or of the folder of several. Their content counts, so the place is any."""
    name = rest.rstrip("/")
    if not re.fullmatch(r"[a-z0-9][\w.-]+(/[^/]+)*", name) or {".", ".."} & set(name.split("/")):
        raise ValueError(f"{hub}://{rest} is no bucket, nor a path in one")
    return Source(hub, product, name, f"{hub}://")


def parse_stored(hub: str, rest: str, product: Product) -> Source:
    """The name of a stage, with its version or without; of an adopted artifact, its name."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", rest):
        raise ValueError(f"{rest!r} is no name of an artifact")
    place = {"store": "store://", "adopted": "adopted:"}[hub]
    return Source(hub, product, rest, f"{place}{rest}")


def parse_champion(hub: str, rest: str, product: Product) -> Source:
    """`NAME@ALIAS` of a registered model."""
    if product != "model" or not re.fullmatch(r"[^/@]+@[^/@]+", rest):
        raise ValueError(f"models:/{rest} is no registered {product}")
    return Source(hub, product, rest, f"models:/{rest}")
