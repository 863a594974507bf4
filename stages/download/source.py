"""Where a model or dataset comes from: `hf://`, `modelscope://`, `file://` or `builtin/`, parsed. Light and pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stages.download.builtin.catalog import BUILTINS

Product = Literal["model", "dataset"]
Hub = Literal["hf", "modelscope"]

_REPOSITORY = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class BuiltinSource:
    """Something that the project makes itself."""

    name: str

    @property
    def place(self) -> str:
        """Where it comes from, without anything that a revision says better: part of the identity."""
        return f"builtin/{self.name}"


@dataclass(frozen=True)
class FileSource:
    """A folder or a single file on this machine."""

    path: Path

    @property
    def place(self) -> str:
        """Any place: the content is what counts."""
        return "file://"


@dataclass(frozen=True)
class HubSource:
    """A repository of a model hub."""

    hub: Hub
    product: Product
    repository: str
    revision: str | None
    """Branch, tag or commit; None is the hub's default branch."""

    @property
    def place(self) -> str:
        """The repository without its revision."""
        return f"{self.hub}://{'datasets/' if self.product == 'dataset' else ''}{self.repository}"

    def __str__(self) -> str:
        return f"{self.place}@{self.revision}" if self.revision else self.place


Source = BuiltinSource | FileSource | HubSource


def parse_source(text: str, product: Product) -> Source:
    """The source that a recipe's `model` or `dataset` names.

    Raises ValueError with what is allowed.
    """
    scheme, separator, rest = text.partition("://")
    if text.startswith("builtin/"):
        return _builtin(text.removeprefix("builtin/"), product)
    if separator and scheme == "file":
        return _file(rest)
    if separator and scheme == "hf":
        return _hub("hf", rest, product)
    if separator and scheme == "modelscope":
        return _hub("modelscope", rest, product)
    raise ValueError(f"{text!r} is no source; write {_allowed(product)}")


def _builtin(name: str, product: Product) -> BuiltinSource:
    names = sorted(name for name, builtin in BUILTINS.items() if builtin.product == product)
    if name not in names:
        raise ValueError(f"there is no builtin {product} {name!r}; there are: {', '.join(names)}")
    return BuiltinSource(name)


def _file(rest: str) -> FileSource:
    if not rest:
        raise ValueError("file:// needs a path: file://PATH, absolute or relative to the recipe")
    return FileSource(Path(rest))


def _hub(hub: Hub, rest: str, product: Product) -> HubSource:
    is_dataset = rest.startswith("datasets/")
    match = _REPOSITORY.fullmatch(rest.removeprefix("datasets/"))
    if match is None or is_dataset != (product == "dataset"):
        raise ValueError(f"{hub}://{rest} is no {product} repository; write {_allowed(product)}")
    return HubSource(hub, product, match["name"], match["revision"])


def _allowed(product: Product) -> str:
    prefix = "datasets/" if product == "dataset" else ""
    return f"hf://{prefix}org/name[@revision], modelscope://{prefix}org/name[@revision], file://PATH or builtin/NAME"
