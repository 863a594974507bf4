"""The steps from files to a folder of packed rows: tokenize parts of files, unless that was done before; pack, write.

Every step is a generator over the one before it, so that memory does not grow with the number of rows. What was found
in the rows of each part is kept with its pieces, and judged when all rows were seen.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from stages.core.errors import DataError
from stages.data.bad_rows import BadRows
from stages.data.config import DataConfig, RowKind
from stages.data.cutting import cut
from stages.data.dataset import Description
from stages.data.files import Place
from stages.data.formats import RowReader
from stages.data.packing import PackedRows, pack
from stages.data.piece_source import PieceSource, Report
from stages.data.pieces import Piece
from stages.data.portion import Portion
from stages.data.row_fields import Unread
from stages.data.seen_rows import SeenRows
from stages.data.tokenizer import TokenizerNotes
from stages.data.tokenizing import Tokenizing, over_long_of
from stages.data.tool_prompt import ToolPrompt
from stages.data.unit_arrays import Units
from stages.data.writer import DatasetWriter

BAD_ROWS = "bad_rows.jsonl"
NO_STOP = (
    "the chat template ends what the assistant says without a special token, so the model will not learn to stop; "
    "mend the template, or give another one (`chat_template`)"
)


class OutOfTimeError(Exception):
    """Raised when a preparation has had its time, after what was found so far was judged. last: the last row read."""

    def __init__(self, last: Place) -> None:
        super().__init__(f"after {last}")
        self.last = last


@dataclass(frozen=True)
class Preprocessing:
    """Everything that decides what `run` writes. pieces: a folder that keeps what was tokenized; it need not be there.
    time_limit_s: of the processor, from the first row on; default: as long as it takes. part: a folder that takes the
    rows so far when that is over, as if they were all."""

    portion: Portion
    folder: Path
    files: list[Path]
    config: DataConfig
    tokenizer_folder: Path
    rows: RowKind
    report: Report
    pieces: Path
    time_limit_s: float | None = None
    part: Path | None = None

    def run(self, target: Path) -> None:
        """Fill the empty folder `target`. Raises DataError, ModelError, OutOfTimeError."""
        with (
            (target / BAD_ROWS).open("w", encoding="utf-8") as stream,
            closing(DatasetWriter(target, is_labelled=self.rows == "labelled")) as writer,
        ):
            seen = SeenRows(target, is_labelled=self.rows == "labelled")
            run = _Run(self, BadRows(stream), writer, seen)
            run.write()
        if run.last_in_time:
            assert self.part
            shutil.move(target, self.part)
            raise OutOfTimeError(run.last_in_time)


class _Run:
    """One pass over the pieces, and what was counted on the way."""

    def __init__(self, task: Preprocessing, bad_rows: BadRows, writer: DatasetWriter, seen: SeenRows) -> None:
        config = task.config
        self._task = task
        self._config = config
        self._bad_rows = bad_rows
        self._writer = writer
        reader = RowReader(config.format, task.rows, config.columns)
        tokenizing = Tokenizing(task.portion, config, task.tokenizer_folder, task.rows, reader)
        self._source = PieceSource(tokenizing, task.folder, task.files, task.pieces, task.report, task.time_limit_s)
        self._tokenizer = self._source.tokenizer.tokenizer
        self._unread = Unread()
        self._notes = TokenizerNotes()
        self._seen = seen
        self._over_long = over_long_of(config)
        self._num_text_tokens = 0
        self._num_text_bytes = 0
        self._num_source_rows = 0
        self._num_tokenized_rows = 0
        self._tool_prompts: tuple[ToolPrompt, ...] = ()

    def write(self) -> None:
        units = (piece.units for piece in self._counted())
        for rows in self._packed(units):
            self._writer.write_rows(*rows)
        if self.last_in_time and not self._task.part:
            self._check_so_far()
            raise OutOfTimeError(self.last_in_time)
        warnings = self._check()
        self._seen.close()
        self._writer.finish(
            Description(
                sequence_length=self._config.sequence_length,
                packing=bool(self._config.packing),
                padding_token=self._tokenizer.padding_token,
                num_rows=self._writer.num_rows,
                num_documents=self._writer.num_documents,
                num_tokens=self._writer.num_tokens,
                num_target_tokens=self._writer.num_target_tokens,
                num_source_rows=self._num_source_rows,
                num_bad_rows=self._bad_rows.num_rows,
                num_over_long=self._over_long.num_over_long,
                conversations=self._notes.teaches_to_stop is not None,
                num_good=self._writer.num_good if self._task.rows == "labelled" else None,
                has_margins=self._writer.has_margins,
                bytes_per_token=self._num_text_bytes / self._num_text_tokens if self._config.packing == "cut" else None,
                warnings=warnings,
                tool_prompts=self._tool_prompts,
            )
        )

    def _packed(self, units: Iterable[Units]) -> Iterable[PackedRows]:
        if self._config.packing == "cut":
            return cut(units, self._config.sequence_length)
        return pack(units, self._config.sequence_length) if self._config.packing else map(_alone, units)

    def _counted(self) -> Iterator[Piece]:
        """All pieces in order, and what was found in their rows counted."""
        for part, piece in self._source.pieces():
            notes = piece.notes
            self._num_source_rows += notes.num_source_rows
            self._num_tokenized_rows += notes.num_tokenized_rows
            self._num_text_tokens += notes.num_text_tokens
            self._num_text_bytes += notes.num_text_bytes
            for bad in piece.bad_rows(part):
                self._bad_rows.add(bad)
            self._over_long.add(piece.over_long(part, self._over_long))
            self._seen.add(part, piece.digests, piece.swapped, piece.numbers, notes.remarkable)
            self._unread.counts += Counter(notes.unread)
            self._notes = self._notes.then(notes.tokenizer)
            self._tool_prompts = self._tool_prompts or ((notes.tool_prompt,) if notes.tool_prompt else ())
            yield piece

    @property
    def last_in_time(self) -> Place | None:
        """The last row that was read, where there was no time for all."""
        return self._source.last_in_time

    def _check_so_far(self) -> None:
        """Raises DataError for what rows that follow cannot make good."""
        if self._config.on_bad_rows == "fail":
            allowed = self._config.max_bad_row_fraction
            self._bad_rows.check("fail", allowed, self._num_source_rows, is_whole=False)
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
            NO_STOP if self._notes.teaches_to_stop is False else None,
            *self._tokenizer.warnings(self._notes),
            self._unread.warning(),
            *self._seen.warnings(),
        )
        if not self._writer.num_rows:
            if config.packing == "cut" and self._num_text_tokens:
                found = (*found, f"all texts together have {self._num_text_tokens} tokens, less than `sequence_length`")
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


def _alone(units: Units) -> PackedRows:
    return units, [1] * len(units)
