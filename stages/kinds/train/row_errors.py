"""What a recipe may not say of a training stage's data, since its method learns from rows of one kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from stages.core.redaction import quoted
from stages.data.any_rows import not_to_be_mixed
from stages.data.config import METHODS_FOR, DataConfig
from stages.data.formats import COLUMN_NAMES, FORMATS
from stages.kinds.train.methods.method import Method


def row_errors(method: Method, data: DataConfig) -> Iterator[str]:
    """What does not go together, and what to say instead."""
    if method.rows == "prompts" and data.datasets:
        yield f"`data.datasets` does not go with `method: {method.name}`, which reads prompts; name one `data.dataset`"
    stated = {name: part.format for name, part in zip(data.names, data.parts.values(), strict=True)}
    stated = {name: form for name, form in stated.items() if form != "auto"}
    if mixed := [*not_to_be_mixed(stated, method.rows)]:
        yield from (f"`data.datasets`, `method: {method.name}`: {problem}" for problem in mixed)
        return
    for place, part in data.parts.items():
        yield from _errors(method, part, place)


def _errors(method: Method, data: DataConfig, place: str) -> Iterator[str]:
    if method.rows not in ("examples", "prompts") and data.train_on == "all":
        yield f"`{place}train_on: all` does not go with `method: {method.name}`, which compares answers; remove it"
    if method.rows != "examples" and data.packing == "cut":
        yield f"`data.packing: cut` does not go with `method: {method.name}`; remove it, or learn texts (`method: sft`)"
    for theirs, ours in data.columns.items():
        if ours not in COLUMN_NAMES:
            yield (
                f"`data.{place}columns`: {theirs} is to be read as {quoted(ours, 100)}, which no format has; expected "
                f"{', '.join(sorted(COLUMN_NAMES))}"
            )
    if twice := [ours for ours, count in Counter(data.columns.values()).items() if count > 1]:
        yield f"`data.{place}columns` reads several columns as {', '.join(twice)}; expected one each"
    suitable = [name for name, form in FORMATS.items() if form.rows == method.rows]
    if method.rows != "prompts" and data.format not in ("auto", *suitable):
        yield (
            f"`data.{place}format: {data.format}` has no rows for `method: {method.name}`; expected auto or "
            f"{' or '.join(suitable)}, or another method: {METHODS_FOR[FORMATS[data.format].rows]}"
        )
