"""Problems of a recipe, as sentences: pydantic's errors with dotted path, what was found, what is allowed."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flows.recipe.text import closest, show
from stages.kinds import KINDS

MAX_PROBLEMS = 100
"""Of an error message: a person reads no more, and to look for what was meant takes its time."""

OF_OTHERS = {
    "max_length": "sequence_length",
    "max_seq_length": "sequence_length",
    "max_seq_len": "sequence_length",
    "seq_len": "sequence_length",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "train_batch_size": "global_batch_size",
    "batch_size": "global_batch_size",
    "gradient_checkpointing": "recompute",
    "bf16": "precision",
}
"""What Transformers, TRL and others call a field → what it is called here."""


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
            return f"{path}: unknown field (value {show(details['input'])}){_meant(KINDS[str(kind)], location)}"
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


def _meant(model: type[BaseModel], location: Sequence[int | str]) -> str:
    """The field of another block that has this very name, or the closest of this block."""
    name = str(location[-1])
    elsewhere = [path for path in _paths(model) if path.rpartition(".")[2] == OF_OTHERS.get(name, name)]
    if elsewhere:
        return f"; did you mean `{' or '.join(elsewhere[:3])}`?"
    return closest(name, _fields(model, location[:-1]))


def _paths(model: type[BaseModel], above: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{above}{name}"
        for inner in models_in(field.annotation):
            yield from _paths(inner, f"{above}{name}.")


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
