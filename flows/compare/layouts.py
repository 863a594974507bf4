"""Layouts of a comparison, read from lines such as `fsdp dp_shard=2`, and the stage's config under each.

Omitted fields have the default of a layout, not the recipe's value, so that a line means the same everywhere
(`flows/planning/layout_text.py`). A line may also have `global_batch_size`, for weak scaling. A misspelt line stops a
comparison before it starts; a layout that cannot work with the stage's batch or its model's sizes is a row with the
reason.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flows.planning.layout_text import engine_and_fields, line_problems
from flows.recipe.text import read_text, show
from stages.core.errors import RecipeError
from stages.core.lines import counted
from stages.core.redaction import shortened
from stages.kinds.train.config import LAYOUT_PROBLEM, TrainConfig
from stages.models.shape import ModelShape
from stages.parallel.layout import Layout, describe_layout
from stages.parallel.legality import refusals

BATCH_FIELD = "global_batch_size"
SHOWN_CHARACTERS = 200
"""Most characters of a layout's line that an error message shows."""
KEYS = (*Layout.model_fields, BATCH_FIELD)


@dataclass(frozen=True)
class RefusedLayout:
    """Layout of a comparison that is written correctly but cannot run, with the reason."""

    text: str
    engine: str
    layout: Layout
    global_batch_size: int
    reason: str


def read_layouts(texts: Sequence[str], stage: TrainConfig) -> tuple[list[TrainConfig], list[RefusedLayout]]:
    """Parse the layouts of a comparison; return the stage's config under each, and the layouts that cannot work.

    texts: each is a layout, or a file with a layout a line (`#` begins a comment). Raises RecipeError that lists every
    bad layout, with what was found, what is allowed, and the closest key, when one is misspelt or none can work.
    """
    lines = [line for text in texts for line in _lines(text)]
    configs: list[TrainConfig] = []
    refused: list[RefusedLayout] = []
    problems: list[str] = []
    for line in lines:
        problems_of_line = [*line_problems(line, KEYS)]
        try:
            configs += [] if problems_of_line else [_with_layout(stage, line)]
        except ValidationError as error:
            refused += _refused(stage, line, error)
            problems_of_line = [] if _is_refusal(error) else [_sentence(details) for details in error.errors()]
        problems += [f"{shortened(line, SHOWN_CHARACTERS)}: {problem}" for problem in problems_of_line]
    problems += [] if problems else _repeated(configs)
    if not lines:
        raise RecipeError("there is no layout; expected such as `fsdp dp_shard=2`")
    if problems or not configs:
        raise _bad_layouts(problems, refused)
    return configs, refused


def without_misfits(
    configs: Sequence[TrainConfig], shape: ModelShape, refused: Sequence[RefusedLayout]
) -> tuple[list[TrainConfig], list[RefusedLayout]]:
    """Return the configs whose layout suits the model's sizes, and `refused` with the others added.

    Raises RecipeError when no config is left.
    """
    reasons = [
        "; ".join(refusals(config.engine, config.layout, config.constraints, config.features(shape), shape))
        for config in configs
    ]
    misfits = [
        RefusedLayout(
            describe_layout(config.engine, config.layout),
            config.engine,
            config.layout,
            config.global_batch_size,
            reason,
        )
        for config, reason in zip(configs, reasons, strict=True)
        if reason
    ]
    if len(misfits) == len(configs):
        raise _bad_layouts([], [*misfits, *refused])
    return [config for config, reason in zip(configs, reasons, strict=True) if not reason], [*misfits, *refused]


def _bad_layouts(problems: Sequence[str], refused: Sequence[RefusedLayout]) -> RecipeError:
    lines = [*problems, *(f"{shortened(one.text, SHOWN_CHARACTERS)}: {one.reason}" for one in refused)]
    title = f"the layouts have {counted(len(lines), 'problem')}:"
    return RecipeError("\n".join([title, *(f"  {line}" for line in lines)]))


def text_of(config: TrainConfig, recipe_batch: int) -> str:
    """Return a config's layout as a line for `read_layouts`, with the batch size if it is not the recipe's."""
    text = describe_layout(config.engine, config.layout)
    batch = config.global_batch_size
    return text if batch == recipe_batch else f"{text} {BATCH_FIELD}={batch}"


def _lines(text: str) -> Iterator[str]:
    try:
        is_file = "=" not in text and Path(text).is_file()
    except OSError:  # longer than a file's name may be
        is_file = False
    if not is_file:
        yield text.strip()
        return
    for line in read_text(Path(text), "the layouts").splitlines():
        layout = line.partition("#")[0].strip()
        if layout:
            yield layout


def _with_layout(stage: TrainConfig, line: str) -> TrainConfig:
    engine, layout, batch = _fields(stage, line)
    tree: dict[str, Any] = stage.model_dump(mode="json", exclude={"layout": True, "execution": {"processes"}})
    tree |= {"engine": engine, BATCH_FIELD: batch, "layout": layout}
    return TrainConfig.model_validate_json(json.dumps(tree), strict=True)


def _fields(stage: TrainConfig, line: str) -> tuple[str, dict[str, Any], Any]:
    engine, values = engine_and_fields(line)
    batch = values.pop(BATCH_FIELD, stage.global_batch_size)
    return engine, values, batch


def _refused(stage: TrainConfig, line: str, error: ValidationError) -> list[RefusedLayout]:
    if not _is_refusal(error):
        return []
    engine, fields, batch = _fields(stage, line)
    reason = "; ".join(str(details["msg"]) for details in error.errors())
    return [RefusedLayout(line, engine, Layout(**fields), batch, reason)]


def _is_refusal(error: ValidationError) -> bool:
    return all(details["type"] == LAYOUT_PROBLEM for details in error.errors())


def _sentence(details: Any) -> str:
    if details["type"] == "value_error":
        return str(details["msg"]).removeprefix("Value error, ")
    expected = str(details["msg"]).replace("Input should be", "expected", 1)
    field = ".".join(str(part) for part in details["loc"] if part != "layout")
    return f"{field}: found {show(details['input'])}, {expected}"


def _repeated(configs: Sequence[TrainConfig]) -> list[str]:
    texts = [text_of(config, recipe_batch=0) for config in configs]
    return [f"{text}: is there {texts.count(text)} times" for text in dict.fromkeys(texts) if texts.count(text) > 1]
