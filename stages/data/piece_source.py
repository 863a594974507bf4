"""Where a preparation's pieces come from: kept by an earlier one, or tokenized now, as long as there is time."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Protocol

from stages.core.numbers import counted
from stages.data.cache import content_key
from stages.data.compression import format_suffix
from stages.data.files import BadRow, Part, Place, Row, name_of, num_places, read_part, read_rows
from stages.data.keys import key_parts
from stages.data.parts import parts_of
from stages.data.pieces import Piece, PieceStore
from stages.data.tokenizing import CHUNK_ROWS, PartTokenizer, Tokenizing, first_rows_read
from stages.data.tokenizing_processes import KeyedPart, num_processes, tokenize
from stages.remote.pointers import size_bytes


class Report(Protocol):
    """Where preparation reports what it does; a `StageContext` is one."""

    def progress(self, done: float, total: float, unit: str, message: str = "") -> None: ...

    def warn(self, message: str) -> None: ...


class PieceSource:
    """The pieces of a dataset's files, in order."""

    def __init__(
        self,
        task: Tokenizing,
        folder: Path,
        files: list[Path],
        kept: Path,
        report: Report,
        time_limit_s: float | None = None,
    ) -> None:
        """folder: of the dataset. kept: a folder of pieces; it need not be there. time_limit_s: of the processor, from
        the first row on that is tokenized; default: as long as it takes. Raises ModelError for a folder without a
        usable tokenizer.
        """
        self.tokenizer = PartTokenizer(task)
        self._task = task
        self._folder = folder
        self._files = files
        self._kept = kept
        self._store = PieceStore(kept)
        self._report = report
        self._time_limit_s = time_limit_s
        self._ends_s = math.inf
        self._begun_s = time.monotonic()
        self._num_rows = 0
        self.last_in_time: Place | None = None
        """The last row that was read, where there was no time for all."""

    def pieces(self) -> Iterator[tuple[Part, Piece]]:
        """Each with the part that it was made of. Raises DataError for rows of no format, or a file that cannot be read
        on, or changes meanwhile."""
        first_rows_read(self._task.reader, self._task.portion, read_rows(self._folder, self._files))
        self._kept.mkdir(parents=True, exist_ok=True)
        self._begun_s = time.monotonic()
        if self._time_limit_s is not None:
            yield from self._pieces_in_time(self._time_limit_s)
            return
        parts = list(self._parts())
        missing = {key: part for part, key in parts if key not in self._store}
        if num_damaged := sum(map(self._store.has_written, missing)):
            self._report.warn(
                f"{counted(num_damaged, 'part')} of the tokenized data in {self._kept} held other bytes than were "
                "written: tokenized again"
            )
        with closing(self._tokenized([(part, key) for key, part in missing.items()])) as tokenized:
            for part, key in parts:
                if missing.pop(key, None):
                    next(tokenized)
                yield from ((part.part, piece) for piece in self._store.read(key))

    def _tokenized(self, missing: list[KeyedPart]) -> Generator[KeyedPart]:
        """The same, each as soon as its pieces are kept."""
        processes = min(num_processes(sum(part.num_bytes for part, _ in missing)), len(missing))
        if processes <= 1:
            for one, key in missing:
                rows = self._reported(one.part)
                self._store.write(key, self.tokenizer.pieces(one.part, rows))
                one.state.check(one.part.path, one.part.name)
                yield one, key
            return
        with closing(tokenize(self.tokenizer, self._kept, missing, processes)) as tokenized:
            for (one, key), num_rows in tokenized:
                self._num_rows += num_rows
                self._say(one.part, one.part.place(num_rows))
                yield one, key

    def _parts(self) -> Iterator[KeyedPart]:
        """All, each hashed when it is asked for."""
        task = self._task
        decided = key_parts(task.portion, task.config, task.tokenizer_folder, task.rows) | {
            "first_rows": str(task.reader)
        }
        for path in self._files:
            for one in parts_of(path, name_of(path, self._folder)):
                yield one, content_key({**decided, "file": format_suffix(path), "content": one.digest})

    def _pieces_in_time(self, limit_s: float) -> Iterator[tuple[Part, Piece]]:
        """Until there is no time any more; of the part at hand then, what was read."""
        for one, key in self._parts():
            if key not in self._store:
                found = list(self.tokenizer.pieces(one.part, self._watched(read_part(one.part), limit_s)))
                if self.last_in_time:
                    yield from ((one.part, piece) for piece in found)
                    return
                one.state.check(one.part.path, one.part.name)
                self._store.write(key, iter(found))
            yield from ((one.part, piece) for piece in self._store.read(key))

    def _watched(self, rows: Iterable[Row | BadRow], limit_s: float) -> Iterator[Row | BadRow]:
        """The same rows, as long as there is time."""
        for row in rows:
            yield row
            cpu_s = time.process_time() + self.tokenizer.tokenizer.template_cpu_s
            self._ends_s = min(self._ends_s, cpu_s + limit_s)
            if cpu_s > self._ends_s:
                self.last_in_time = row.place
                return

    def _reported(self, part: Part) -> Iterator[Row | BadRow]:
        """The rows of a part; reports how far they are."""
        for row in read_part(part):
            yield row
            if self._num_rows % CHUNK_ROWS == 0:
                self._say(part, row.place)
            self._num_rows += 1

    def _say(self, part: Part, place: Place) -> None:
        places, total = self._places
        first, end = places[part.path]
        done = first + place.number
        if part.begin and not part.num_before:  # which line its first one is, nobody has counted
            done += (end - first) * part.begin // size_bytes(part.path)
        seconds = time.monotonic() - self._begun_s
        rate = f" ({self._num_rows / seconds:,.0f} rows/s)" if self._num_rows and seconds else ""
        message = f"tokenizing {self._task.portion.name} data{rate}"
        self._report.progress(min(done, total), total, "rows", message)

    @cached_property
    def _places(self) -> tuple[dict[Path, tuple[int, int]], int]:
        """How many places lie before each file and up to its end, and in all of them."""
        places, total = {}, 0
        for path in self._files:
            count = num_places(path)
            places[path] = total, total + count
            total += count
        return places, total
