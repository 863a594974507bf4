"""Quality of rows: rewards of their answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from stages.core.contract import StageContext
from stages.core.errors import DataError
from stages.data.any_rows import AnyRowReader, ReadRow
from stages.data.messages import Document, PlainText
from stages.kinds.curate.config import Quality
from stages.kinds.curate.spool import SpooledRow
from stages.rewards.judging import judging
from stages.rewards.reward import Completion, RewardContext

ROWS_AT_A_TIME = 256
KEPT_FOLDER = "rewards"


def scored(config: Quality, rows: Iterable[SpooledRow], context: StageContext) -> Iterator[tuple[int, float]]:
    """Yield the number of each row and its sum of rewards. Raises DataError for a row without one answer to judge."""
    readers: dict[str, AnyRowReader] = {}
    own = RewardContext(context.inputs, context.scratch / KEPT_FOLDER, context.warn)
    with judging(config.rewards, own) as judge:
        remaining = iter(rows)
        while batch := list(itertools.islice(remaining, ROWS_AT_A_TIME)):
            named = []
            for row in batch:
                read = readers.setdefault(row.place.dataset, AnyRowReader()).read(row.content)
                try:
                    named.append((str(row.place), _completion(read, config.reference)))
                except DataError as error:
                    raise DataError(f"`quality`: {row.place} {error}") from error
            for row, judgement in zip(batch, judge(named), strict=True):
                yield row.number, judgement.total


def _completion(row: ReadRow, column: str | None) -> Completion:
    """Return the last answer of a row as a completion, with what stands before it as its prompt."""
    if row.is_prompt or len(row.documents) > 1:
        found = "is a prompt alone, without an answer" if row.is_prompt else "is a pair of two answers"
        raise DataError(f"{found}; `quality` judges rows of one answer")
    (document,) = row.documents
    if isinstance(document, PlainText):
        prompt, answer = document.prompt, document.completion
        asked: Document = replace(document, completion="")
    else:
        *before, last = document.messages
        prompt, answer = "\n".join(message["content"] for message in before), last["content"]
        asked = replace(document, messages=before, unlearned=frozenset())
    reference = None if column is None else row.content.get(column)
    if column is not None and reference is None:
        raise DataError(f"has nothing in `{column}`, which `quality.reference` names")
    return Completion(prompt, answer, 0, None if reference is None else str(reference), row.content, asked)
