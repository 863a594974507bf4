"""The steps from files to a folder of packed rows: read, check, render, tokenize, fit, pack, write.

Every step is a generator over the one before it, so that memory does not grow with the number of rows. Bad rows go
aside on the way, and are judged when all rows were seen.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Protocol

from stages.core.errors import DataError
from stages.data.answers import AnswerCheck, vocabulary_size
from stages.data.bad_rows import BadRows
from stages.data.config import DataConfig, RowKind
from stages.data.dataset import Description
from stages.data.files import BadRow, Place, Row, num_places, read_rows
from stages.data.formats import RowReader
from stages.data.messages import RowError
from stages.data.packing import pack
from stages.data.portion import Portion
from stages.data.seen_rows import SeenRows
from stages.data.templates import Rendered
from stages.data.tokenizer import DocumentTokenizer
from stages.data.units import OverLong, Unit, check_learnable
from stages.data.writer import DatasetWriter

BAD_ROWS = "bad_rows.jsonl"
CHUNK_ROWS = 1024
NO_STOP = (
    "the chat template ends what the assistant says without a special token, so the model will not learn to stop; "
    "mend the template, or give another one (`chat_template`)"
)


RenderedRow = tuple[Place, list[tuple[Rendered, ...]], bool | None, float | None]
"""Where a row stands, its units, and whether its answer is a good one."""


class OutOfTimeError(Exception):
    """Raised when a preparation has had its time, after what was found so far was judged. last: the last row read."""

    def __init__(self, last: Place) -> None:
        super().__init__(f"after {last}")
        self.last = last


class Report(Protocol):
    """Where preparation reports what it does; a `StageContext` is one."""

    def progress(self, done: float, total: float, unit: str, message: str = "") -> None: ...

    def warn(self, message: str) -> None: ...


@dataclass(frozen=True)
class Preprocessing:
    """Everything that decides what `run` writes. time_limit_s: of the processor, from the first row on; default:
    as long as it takes. part: a folder that takes the rows so far when that is over, as if they were all."""

    portion: Portion
    folder: Path
    files: list[Path]
    config: DataConfig
    tokenizer_folder: Path
    rows: RowKind
    report: Report
    time_limit_s: float | None = None
    part: Path | None = None

    def run(self, target: Path) -> None:
        """Fill the empty folder `target`. Raises DataError, ModelError, OutOfTimeError."""
        with (
            (target / BAD_ROWS).open("w", encoding="utf-8") as stream,
            closing(DatasetWriter(target, is_labelled=self.rows == "labelled")) as writer,
        ):
            run = _Run(self, BadRows(stream), writer)
            run.write(target)
        if run.last_in_time:
            assert self.part
            shutil.move(target, self.part)
            raise OutOfTimeError(run.last_in_time)


class _Run:
    """One pass over the rows, and what was counted on the way."""

    def __init__(self, task: Preprocessing, bad_rows: BadRows, writer: DatasetWriter) -> None:
        config = task.config
        self._task = task
        self._config = config
        self._bad_rows = bad_rows
        self._writer = writer
        self._reader = RowReader(config.format, task.rows)
        self._tokenizer = DocumentTokenizer(
            task.tokenizer_folder,
            config.chat_template,
            config.train_on,
            turns=config.turns,
            template_date=config.template_date,
            special_tokens_in_content=config.special_tokens_in_content,
        )
        self._answers = AnswerCheck(self._tokenizer.special_tokens, vocabulary_size(task.tokenizer_folder))
        self._seen = SeenRows()
        self._over_long = OverLong(config.over_long, config.sequence_length)
        self._num_source_rows = 0
        self._num_tokenized_rows = 0
        self.last_in_time: Place | None = None
        """The last row that was read, where there was no time for all."""

    def write(self, target: Path) -> None:
        units = self._units()
        try:
            for row in pack(units, self._config.sequence_length) if self._config.packing else ([one] for one in units):
                self._writer.write_row(row)
        except OutOfTimeError:
            self._check_so_far()
            raise
        warnings = self._check()
        self._seen.write(target)
        self._writer.finish(
            Description(
                sequence_length=self._config.sequence_length,
                packing=self._config.packing,
                padding_token=self._tokenizer.padding_token,
                num_rows=self._writer.num_rows,
                num_documents=self._writer.num_documents,
                num_tokens=self._writer.num_tokens,
                num_target_tokens=self._writer.num_target_tokens,
                num_source_rows=self._num_source_rows,
                num_bad_rows=self._bad_rows.num_rows,
                num_over_long=self._over_long.num_over_long,
                conversations=self._tokenizer.teaches_to_stop is not None,
                num_good=self._writer.num_good if self._task.rows == "labelled" else None,
                has_margins=self._writer.has_margins,
                warnings=warnings,
            )
        )

    def _units(self) -> Iterator[Unit]:
        """What can be learned of each row, no longer than a packed row."""
        for chunk in _chunks(self._rendered()):
            if self._bad_rows.num_rows and self._config.on_bad_rows == "fail":
                continue  # it will fail: only look for further bad rows, which is much faster
            texts = [document for _, units, _, _ in chunk for unit in units for document in unit]
            tokens = iter(self._tokenizer.encode(texts))
            for place, units, is_good, margin in chunk:
                tokenized = [Unit(tuple(islice(tokens, len(unit))), is_good, margin) for unit in units]
                yield from self._fitted(tokenized, place)

    def _fitted(self, units: list[Unit], place: Place) -> list[Unit]:
        """What is left of a row's units. One that teaches nothing makes the row a bad one."""
        self._num_tokenized_rows += 1
        found = []
        try:
            for unit in units:
                if (fitted := self._over_long.fit(unit, place)) is not None:
                    self._answers.check_tokens(fitted)
                    check_learnable(fitted, was_truncated=len(fitted) < len(unit))
                    found.append(fitted)
        except RowError as error:
            self._bad_rows.add(BadRow(place, str(error)))
            return []
        return found

    def _rendered(self) -> Iterator[RenderedRow]:
        """Where each good row stands, and its units as text."""
        task = self._task
        rows = self._watched(read_rows(task.folder, task.files))
        for row in task.portion.select(rows):
            self._num_source_rows += 1
            if isinstance(row, BadRow):
                self._bad_rows.add(row)
                continue
            try:
                documents = self._reader.read(row.content)
                self._answers.check_text(documents)
                rendered = self._tokenizer.render_units(documents)
                is_good, margin = self._reader.label(row.content), self._reader.margin(row.content)
                self._seen.add(row.place, documents)
                yield row.place, rendered, is_good, margin
            except RowError as error:
                self._bad_rows.add(BadRow(row.place, str(error)))

    def _watched(self, rows: Iterable[Row | BadRow]) -> Iterator[Row | BadRow]:
        """The same rows, as long as there is time; where that is not limited, reports how far they are."""
        ends_s = math.inf
        for number, row in enumerate(rows):
            yield row
            if self._task.time_limit_s is None:
                self._report(number, row.place)
                continue
            ends_s = min(ends_s, time.process_time() + self._task.time_limit_s)
            if time.process_time() <= ends_s:
                continue
            if not self._task.part:
                raise OutOfTimeError(row.place)
            self.last_in_time = row.place
            return

    def _report(self, number: int, place: Place) -> None:
        if number % CHUNK_ROWS == 0:
            before, total = self._places
            done = before[place.file] + place.number
            message = f"tokenizing {self._task.portion.name} data"
            self._task.report.progress(min(done, total), total, "rows", message)

    @cached_property
    def _places(self) -> tuple[dict[str, int], int]:
        """How many places lie before each file, and in all of them."""
        before, total = {}, 0
        for path in self._task.files:
            before[str(path.relative_to(self._task.folder))] = total
            total += num_places(path)
        return before, total

    def _check_so_far(self) -> None:
        """Raises DataError for what rows that follow cannot make good."""
        if self._config.on_bad_rows == "fail":
            self._bad_rows.check("fail", 0.0, self._num_source_rows)
        if self._config.over_long == "fail":
            self._over_long.check(self._num_tokenized_rows)

    def _check(self) -> tuple[str, ...]:
        """What to warn of. Raises DataError for what the recipe does not allow, or when nothing is left."""
        config, portion = self._config, self._task.portion
        if not self._num_source_rows:
            cause = f"evaluation_fraction {portion.fraction} leaves" if portion.fraction else "there are"
            raise DataError(
                f"no {portion.name} rows: {cause} none in {', '.join(path.name for path in self._task.files)} of "
                f"{self._task.folder}"
            )
        found = (
            self._bad_rows.check(config.on_bad_rows, config.max_bad_row_fraction, self._num_source_rows),
            self._over_long.check(self._num_tokenized_rows),
            NO_STOP if self._tokenizer.teaches_to_stop is False else None,
            *self._tokenizer.warnings(),
            self._reader.unread.warning(),
            *self._seen.warnings(),
        )
        if not self._writer.num_rows:
            raise DataError(f"no {portion.name} rows are left: {'; '.join(filter(None, found))}")
        self._check_labels()
        return tuple(filter(None, found))

    def _check_labels(self) -> None:
        """Raises DataError where there is nothing to tell good answers from, or bad ones."""
        num_good, num_rows = self._writer.num_good, self._writer.num_documents
        if self._task.rows == "labelled" and self._task.portion.name == "training" and num_good in (0, num_rows):
            raise DataError(
                f"all {num_rows} training rows have `label: {str(num_good > 0).lower()}`; expected good and bad "
                "answers, to learn the difference; add the others, or learn from good ones alone (`method: sft`)"
            )


def _chunks(rendered: Iterator[RenderedRow]) -> Iterator[list[RenderedRow]]:
    while chunk := list(islice(rendered, CHUNK_ROWS)):
        yield chunk
