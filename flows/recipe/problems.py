"""Problems of a recipe as sentences, made from pydantic's errors: the field's path, what was found, what is allowed."""

import re
import typing
from collections.abc import Iterator, Sequence

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flows.recipe.text import closest, show
from stages.core.fields import models_in
from stages.kinds.registry import KINDS

MAX_PROBLEMS = 100
"""Most problems in one error message, since finding a similar name for each problem takes time."""

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
"""Recipe field that corresponds to a field name of Transformers, TRL and similar libraries, for hints."""

OF_GRPO = {"environments": "; only GRPO acts in several: say one `environment`, and write a stage for each"}
"""Fields of GRPO alone that other kinds may be given, with what to do there."""


def explain(error: ValidationError, stage: str, kind: type[BaseModel] | None) -> list[str]:
    """Return a sentence for each validation error of a stage's config, at most `MAX_PROBLEMS`.

    kind: config class of the stage's kind, whose error it is; None for a stage whose kind is missing or unknown.
    """
    return [_sentence(details, f"stages.{stage}", kind) for details in _meant_members(error.errors())[:MAX_PROBLEMS]]


def _meant_members(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Return the errors without those of the other members of a union of words and a block (`ngram`, `{draft: …}`).

    pydantic lists the errors of every member; a text was meant to be one of the words, a mapping the block.
    """
    of_words = {details["loc"][:-1] for details in errors if details["loc"] and _is_word(details["loc"][-1])}
    return [
        details
        for details in errors
        if details["loc"][:-1] not in of_words
        or not isinstance(details["input"], dict if _is_word(details["loc"][-1]) else str)
    ]


def _is_word(part: int | str) -> bool:
    """Return whether a part of a pydantic location is a union's member of words, `literal['ngram','mtp']`."""
    return str(part).startswith("literal[")


def _sentence(details: ErrorDetails, stage: str, kind: type[BaseModel] | None) -> str:
    location = details["loc"]
    path = ".".join([stage, *(_walked(kind, location)[0] if kind else map(str, location))])
    match details["type"]:
        case "union_tag_not_found" if not location:
            return f"{path}.kind: missing; there are: {', '.join(KINDS)}"
        case "union_tag_invalid" if not location:
            tag = str(details["ctx"]["tag"])
            return f"{path}.kind: found `{tag}`, which is no kind of stage{closest(tag, KINDS)}"
        case "union_tag_not_found":
            return f"{path}.{_discriminator(details)}: missing; it has no default"
        case "union_tag_invalid":
            tag, expected = str(details["ctx"]["tag"]), details["ctx"]["expected_tags"].replace("'", "")
            return f"{path}.{_discriminator(details)}: found `{tag}`{closest(tag, expected.split(', '))}"
        case "extra_forbidden":
            hint = _meant(kind, location) if kind else ""
            return f"{path}: unknown field (value {show(details['input'])}){hint}"
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
    if details["type"] == "string_pattern_mismatch":
        return f"expected text of the form {details['ctx']['pattern']}"
    return re.sub(r"^Input should be", "expected", details["msg"])


def _discriminator(details: ErrorDetails) -> str:
    return str(details["ctx"]["discriminator"]).strip("'")


def _close_literal(details: ErrorDetails) -> str:
    # "Input should be 'queue' or 'skip'" -> queue, skip
    allowed = re.findall(r"'([^']+)'", details["msg"])
    hint = closest(str(details["input"]), allowed)
    return hint if "did you mean" in hint else ""


def _meant(model: type[BaseModel], location: Sequence[int | str]) -> str:
    """Return a hint for an unknown field: a field with the same name elsewhere, or one with a similar name."""
    name = str(location[-1])
    # Only the last name of a path is compared, so that a field of any block is found.
    elsewhere = [path for path in _paths(model) if path.rpartition(".")[2] == OF_OTHERS.get(name, name)]
    if elsewhere:
        return f"; did you mean `{' or '.join(elsewhere[:3])}`?"
    if name in OF_GRPO:
        return OF_GRPO[name]
    return closest(name, [field for one in _walked(model, location[:-1])[1] for field in one.model_fields])


def _paths(model: type[BaseModel], above: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{above}{name}"
        for inner in models_in(field.annotation):
            yield from _paths(inner, f"{above}{name}.")


def _walked(model: type[BaseModel], location: Sequence[int | str]) -> tuple[list[str], list[type[BaseModel]]]:
    """Return the recipe path of a pydantic error, and the config classes that the error may concern.

    A location of pydantic also contains which model of a union it is (by `type` or class); those parts are left out.
    """
    parts, models, is_entry = [], [model], False
    for part in map(str, location):
        # After a field that is a mapping or a list, the next part is a name or an index of the recipe, and no field.
        fields = [] if is_entry else [one.model_fields[part].annotation for one in models if part in one.model_fields]
        chosen = [] if fields or is_entry else [one for one in models if part in _names(one)]
        if fields:
            models = [inner for annotation in fields for inner in models_in(annotation)]
        parts += [] if chosen or _is_word(part) else [part]
        models = chosen or models
        is_entry = any(typing.get_origin(annotation) in (dict, tuple) for annotation in fields)
    return parts, models


def _names(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the names under which pydantic's errors list one class of a union: its class name or its `type`."""
    discriminator = model.model_fields.get("type")
    return (model.__name__, *(typing.get_args(discriminator.annotation) if discriminator else ()))
