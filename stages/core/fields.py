"""Marks on the fields of a config, which say what a field's value is part of; and how to find them."""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

Product = Literal["model", "adapter", "reward_model", "dataset", "server", "scores", "verdict", "publication"]


def _as_split(name: str) -> str:
    if re.fullmatch(r"\w|\w.*\S", name):
        return name
    raise ValueError(f"found {name!r}, expected how names of files or folders begin: with a letter or a digit")


SplitName = Annotated[str, Field(min_length=1), AfterValidator(_as_split)]
"""Not blank, nor `.`, which would be all files of a dataset."""


@dataclass(frozen=True)
class Reference:
    """Marks a field that names another stage, which must produce one of `products`."""

    products: tuple[Product, ...]


@dataclass(frozen=True)
class OutsideInput:
    """Marks a path outside the store: its content is identity, where it lies is not."""


@dataclass(frozen=True)
class SourceText:
    """Marks a text that says where a model or a dataset comes from: a hub's name for it, or `file://` and a path."""


@dataclass(frozen=True)
class AddedLater:
    """Marks an optional field whose default does what was done before there was the field.

    At its default it is no part of the identity: artifacts that exist keep their versions.
    """


def marked_values(model: BaseModel, marker: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of every non-None field, at any depth, that is annotated with a `marker` instance.

    Of a tuple, each item: `evaluations.0`.
    """
    marked = marked_fields(type(model), marker)
    for name, value in vars(model).items():
        if value is None:
            continue
        path = f"{prefix}{name}"
        if name in marked:
            if isinstance(value, tuple):
                yield from ((f"{path}.{number}", item) for number, item in enumerate(value))
            else:
                yield path, value
        else:
            for inner, content in _models(value, path):
                yield from marked_values(content, marker, inner)


def values_named(model: BaseModel, field: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of every field of this name, at any depth."""
    for name, value in vars(model).items():
        if name == field:
            yield f"{prefix}{name}", value
        else:
            for inner, content in _models(value, f"{prefix}{name}"):
                yield from values_named(content, field, inner)


def unset_later(model: BaseModel, prefix: str = "") -> Iterator[str]:
    """Dotted paths of fields marked `AddedLater` that have their default, at any depth."""
    marked = marked_fields(type(model), AddedLater)
    fields = type(model).model_fields
    for name, value in vars(model).items():
        if name in marked and value == fields[name].get_default(call_default_factory=True):
            yield f"{prefix}{name}"
        else:
            for inner, content in _models(value, f"{prefix}{name}"):
                yield from unset_later(content, inner)


def _models(value: object, path: str) -> Iterator[tuple[str, BaseModel]]:
    """The model that a field's value is, or those that it holds; each with the beginning of its fields' paths."""
    if isinstance(value, BaseModel):
        yield f"{path}.", value
    elif isinstance(value, dict):
        yield from ((f"{path}.{name}.", item) for name, item in value.items() if isinstance(item, BaseModel))
    elif isinstance(value, tuple):
        yield from ((f"{path}.{number}.", item) for number, item in enumerate(value) if isinstance(item, BaseModel))


@functools.cache  # a recipe's identity asks for them at every field, again and again
def marked_fields(model: type[BaseModel], marker: type) -> frozenset[str]:
    """Names of the fields that are annotated with a `marker` instance."""
    return frozenset(name for name, field in model.model_fields.items() if find_marker(field, marker))


def find_marker(field: Any, marker: type) -> Any | None:
    """The `marker` instance in a pydantic field's annotation (also inside `X | None`), or None."""
    candidates: list[Any] = [*field.metadata]
    todo = [field.annotation]
    while todo:
        annotation = todo.pop()
        candidates += getattr(annotation, "__metadata__", ())
        todo += typing.get_args(annotation)
    return next((candidate for candidate in candidates if isinstance(candidate, marker)), None)


def without(tree: dict[str, Any], paths: set[str], prefix: str = "") -> dict[str, Any]:
    """A dumped config without the fields at these dotted paths."""
    return {
        key: _without(value, paths, f"{prefix}{key}.")
        for key, value in tree.items()
        if not {f"{prefix}{key}", f"{prefix}{key}.0"} & paths
    }


def _without(value: Any, paths: set[str], prefix: str) -> Any:
    if isinstance(value, dict):
        return without(value, paths, prefix)
    if isinstance(value, list):
        return [_without(item, paths, f"{prefix}{number}.") for number, item in enumerate(value)]
    return value
