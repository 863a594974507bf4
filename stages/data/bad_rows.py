"""Rows that cannot be learned from: listed in a file, counted, and an error when there are too many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, TextIO

from stages.core.errors import DataError
from stages.data.files import BadRow

NUM_NAMED = 10


class BadRows:
    """Takes each bad row as it is found; memory does not grow with their number."""

    def __init__(self, stream: TextIO) -> None:
        """`stream` takes one JSON object a line: "file", "line" or "row", "reason"."""
        self._stream = stream
        self._first: list[BadRow] = []
        self.num_rows = 0

    def add(self, bad: BadRow) -> None:
        """List one."""
        self.num_rows += 1
        if len(self._first) < NUM_NAMED:
            self._first.append(bad)
        place = bad.place
        row = {"file": place.file, place.counts: place.number, "reason": bad.reason}
        self._stream.write(json.dumps(row, ensure_ascii=False) + "\n")

    def check(
        self, policy: Literal["fail", "drop"], max_fraction: float, num_source_rows: int, *, is_whole: bool = True
    ) -> str | None:
        """Return what to warn of. Raises DataError when there are more bad rows than the recipe allows.

        is_whole: all rows were seen, and not only the first.
        """
        if not self.num_rows:
            return None
        found = f"{self.num_rows} of {'' if is_whole else 'the first '}{num_source_rows} rows cannot be learned from"
        if policy == "fail":
            needed = needed_fraction(self.num_rows, num_source_rows)
            fraction = f" and `max_bad_row_fraction: {needed:g}`" if needed > max_fraction else ""
            raise DataError(
                f"{found}:\n{self._named()}\nFix these rows, or set `on_bad_rows: drop`{fraction} to skip them."
            )
        if self.num_rows > max_fraction * num_source_rows:
            raise DataError(
                f"{found}, more than max_bad_row_fraction {max_fraction} allows to drop:\n{self._named()}\n"
                "Fix these rows, or raise `max_bad_row_fraction` to "
                f"{needed_fraction(self.num_rows, num_source_rows):g}."
            )
        return f"{found} and were dropped: {self._first[0].place} {self._first[0].reason}"

    def _named(self) -> str:
        lines = [f"  {bad.place} {bad.reason}" for bad in self._first]
        if self.num_rows > len(lines):
            lines.append(f"  … and {self.num_rows - len(lines)} more")
        return "\n".join(lines)


def needed_fraction(num_bad: int, num_rows: int) -> float:
    """Return the smallest `max_bad_row_fraction` of four digits that allows so many bad rows to be dropped."""
    ten_thousandths = -(-10_000 * num_bad // num_rows)
    if num_bad > ten_thousandths / 10_000 * num_rows:  # 29 of 100: 0.29 * 100 is less than 29
        ten_thousandths += 1
    return ten_thousandths / 10_000


def write_list(path: Path, lists: list[Path]) -> None:
    """Join the lists of several preparations into one; no file is written when all are empty."""
    texts = [text for part in lists if (text := part.read_text(encoding="utf-8"))]
    if texts:
        path.write_text("".join(texts), encoding="utf-8")
