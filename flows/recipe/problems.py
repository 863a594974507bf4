"""Problems of a recipe, as sentences: pydantic's errors with dotted path, what was found, what is allowed."""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flows.recipe.text import closest, show
from stages.kinds import KINDS

MAX_PROBLEMS = 100
"""Of an error message: a person reads no more, and to look for what was meant takes its time."""


def explain(error: ValidationError, stage: str) -> list[str]:
    """One sentence for each problem of a stage's config; of very many, for the first."""
    return [_sentence(details, f"stages.{stage}") for details in error.errors()[:MAX_PROBLEMS]]


def _sentence(details: ErrorDetails, stage: str) -> str:
    # Within the union of kinds, the first part of a location is the kind itself.
    kind, location = (details["loc"][0], details["loc"][1:]) if details["loc"] else (None, ())
    path = ".".join([stage, *map(str, location)])
    match details["type"]:
        case "union_tag_not_found":
            return f"{path}.kind: missing; there are: {', '.join(KINDS)}"
        case "union_tag_invalid":
            tag = str(details.get("ctx", {}).get("tag"))
            return f"{path}.kind: found `{tag}`, which is no kind of stage{closest(tag, KINDS)}"
        case "extra_forbidden":
            known = _fields(KINDS[str(kind)], location[:-1])
            return f"{path}: unknown field (value {show(details['input'])}){closest(str(location[-1]), known)}"
        case "missing":
            return f"{path}: missing; it has no default"
        case "layout":
            return f"{path}: {details['msg']}"
        case "value_error":
            return f"{path}: {details['msg'].removeprefix('Value error, ')}"
        case "literal_error":
            return f"{path}: found {show(details['input'])}, {_expected(details)}{_close_literal(details)}"
        case _:
            return f"{path}: found {show(details['input'])}, {_expected(details)}"


def _expected(details: ErrorDetails) -> str:
    return re.sub(r"^Input should be", "expected", details["msg"])


def _close_literal(details: ErrorDetails) -> str:
    allowed = re.findall(r"'([^']+)'", details["msg"])
    hint = closest(str(details["input"]), allowed)
    return hint if "did you mean" in hint else ""


def _fields(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Names of the fields that may stand at `location`, which leads through models only."""
    for part in location:
        annotation = model.model_fields[str(part)].annotation
        model = next(inner for inner in models_in(annotation))
    return list(model.model_fields)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Models that a field's annotation is, or may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in typing.get_args(annotation) for model in models_in(argument)]
