"""Rows of a dataset whose personal data are written over, as far as something is left to learn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from stages.data.any_rows import AnyRowReader, ReadRow
from stages.data.messages import RowError
from stages.data.personal_data import redacted


class Redactor:
    """Writes over what the recipe names, and counts it. readers: what read the rows of each dataset."""

    def __init__(self, kinds: Collection[str], counts: Counter[str], readers: Mapping[str, AnyRowReader]) -> None:
        self._kinds = kinds
        self._counts = counts
        self._readers = readers

    def redacted(self, dataset: str, row: ReadRow) -> tuple[ReadRow, tuple[str, str] | None]:
        """The row; and step and reason where nothing can be learned from it any more."""
        content = redacted(row.content, self._kinds, self._counts)
        try:
            return self._readers[dataset].read(content), None
        except RowError as error:
            return row, ("redact", f"{error}, once personal data are written over")
