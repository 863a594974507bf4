"""Building blocks for config classes: the strict base class, number types with bounds, and marks for config fields."""

import functools
import math
import re
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError


class StrictModel(BaseModel):
    """Immutable base class of configs (pydantic), which refuses unknown fields."""

    # A diverged loss is NaN, and must come back as such from `result.json`.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants", defer_build=True)

    @classmethod
    def read_or_none(cls, path: Path) -> Self | None:
        """Read a config from a JSON file; return None if the file is missing, incomplete or has other fields."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None


NAMED_FIELDS = 5


def what_is_wrong(error: Exception) -> str:
    """Return an error's text; of a failed validation, the first fields that are wrong, each with the reason."""
    if not isinstance(error, ValidationError):
        return str(error)
    wrong = [f"{'.'.join(map(str, field['loc'])) or 'the whole'}: {field['msg']}" for field in error.errors()]
    more = f"; and {len(wrong) - NAMED_FIELDS} more" if len(wrong) > NAMED_FIELDS else ""
    return "; ".join(wrong[:NAMED_FIELDS]) + more


SMALLEST = 2.0**-126
"""Smallest positive number that fp32 represents at full precision (normal number)."""
LARGEST = (2 - 2.0**-23) * 2.0**127  # the largest finite number of fp32


def _as_held(value: float) -> float:
    if value and math.isfinite(value) and not SMALLEST <= abs(value) <= LARGEST:
        size = "small" if abs(value) < SMALLEST else "large"
        raise ValueError(
            f"{value:g} is too {size} for fp32, in which it is computed; expected a size between {SMALLEST:.2g} and "
            f"{LARGEST:.2g}"
        )
    return value


HELD_IN_FP32 = AfterValidator(_as_held)
"""Validator that refuses numbers beyond fp32; last in a type, as those after it would miss in the JSON schema."""
PositiveFp32 = Annotated[float, Field(gt=0, allow_inf_nan=False), HELD_IN_FP32]
NonNegativeFp32 = Annotated[float, Field(ge=0, allow_inf_nan=False), HELD_IN_FP32]

NatsPerToken = Annotated[float, Field(gt=0, le=12)]
"""Bound on log-probability differences, in nats per token; a guess among 160,000 tokens is 12 from certainty."""

Seconds = Annotated[float, Field(gt=0, le=1e8, allow_inf_nan=False)]
"""Type of a config field for a duration in seconds, at most three years, since system calls refuse larger numbers."""


def _as_split(name: str) -> str:
    if re.fullmatch(r"\w|\w.*\S", name):
        return name
    raise ValueError(f"found {name!r}, expected how names of files or folders begin: with a letter or a digit")


SplitName = Annotated[str, Field(min_length=1), AfterValidator(_as_split)]
"""Type of a config field for the name of a dataset's split, which begins with a letter or digit and is not blank."""


Product = Literal["model", "adapter", "reward_model", "dataset", "server", "scores", "verdict", "publication"]


@dataclass(frozen=True)
class Reference:
    """Mark on a config field that names another stage, whose output must be one of `products`, such as a model."""

    products: tuple[Product, ...]


@dataclass(frozen=True)
class OutsideInput:
    """Mark on a config field that names a path outside the store; the content of the path identifies the artifact."""


@dataclass(frozen=True)
class SourceText:
    """Mark on a config field that names a model's or dataset's source: a name on a hub, or `file://` and a path."""


@dataclass(frozen=True)
class AddedLater:
    """Mark on an optional config field that was added later; with its default, artifacts keep their old versions."""


def marked_values(model: BaseModel, marker: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted path (tuple: `evaluations.0`) and value of fields with a mark, unless None, at any depth."""
    marked, leading = marked_fields(type(model), marker), _leading_fields(type(model), marker)
    for name, value in vars(model).items():
        if value is None or name not in leading:
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
    """Yield the dotted path and value of every config field with a given name, at any depth."""
    for name, value in vars(model).items():
        if name == field:
            yield f"{prefix}{name}", value
        else:
            for inner, content in _models(value, f"{prefix}{name}"):
                yield from values_named(content, field, inner)


def unset_later(model: BaseModel, prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every later-added config field (`AddedLater`) that has its default, at any depth."""
    marked, leading = marked_fields(type(model), AddedLater), _leading_fields(type(model), AddedLater)
    fields = type(model).model_fields
    for name, value in vars(model).items():
        if name not in leading:
            continue
        if name in marked and value == fields[name].get_default(call_default_factory=True):
            yield f"{prefix}{name}"
        else:
            for inner, content in _models(value, f"{prefix}{name}"):
                yield from unset_later(content, inner)


def _models(value: object, path: str) -> Iterable[tuple[str, BaseModel]]:
    """Return each nested config object in a field's value, with the dotted path that precedes its field names."""
    if isinstance(value, BaseModel):
        return [(f"{path}.", value)]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple) else ()
    return [(f"{path}.{key}.", item) for key, item in items if isinstance(item, BaseModel)]


@functools.cache  # a recipe's identity asks for them at every field, again and again
def marked_fields(model: type[BaseModel], marker: type) -> frozenset[str]:
    """Return the names of a config class's fields that are annotated with a mark of a given class, like `Reference`."""
    return frozenset(name for name, field in model.model_fields.items() if find_marker(field, marker))


@functools.cache
def _leading_fields(model: type[BaseModel], marker: type) -> frozenset[str]:
    """Return the names of a config class's fields that have a mark, or that hold configs with such fields."""
    return marked_fields(model, marker) | {
        name
        for name, field in model.model_fields.items()
        if any(_leading_fields(inner, marker) for inner in models_in(field.annotation))
    }


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the pydantic models that a field's annotation contains."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in typing.get_args(annotation) for model in models_in(argument)]


def find_marker(field: Any, marker: type) -> Any | None:
    """Return the mark (annotation) of a given class on a config field, also inside `X | None`; None without one."""
    candidates: list[Any] = [*field.metadata]
    todo = [field.annotation]
    while todo:
        annotation = todo.pop()
        candidates += getattr(annotation, "__metadata__", ())
        todo += typing.get_args(annotation)
    return next((candidate for candidate in candidates if isinstance(candidate, marker)), None)


def without(tree: dict[str, Any], paths: set[str], prefix: str = "") -> dict[str, Any]:
    """Return a config, dumped as a dictionary, without the fields at these dotted paths."""
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
