"""One row of a table of published runs, read cell by cell, with what had to be assumed. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from stages.core.errors import DataError

YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class UnknownRunError(Exception):
    """A row says too little of its model, or is of a GPU without a description."""


@dataclass
class Cells:
    """A row that is read cell by cell, noting what had to be assumed."""

    path: Path
    line: int
    cells: dict[str, str]
    assumed: list[str] = field(default_factory=list)

    def text(self, column: str) -> str:
        return self.cells.get(column, "")

    def number(self, column: str) -> int | None:
        """A positive number; `~250k` counts as one."""
        text = self.text(column).lower().lstrip("~").replace(",", "")
        if not text:
            return None
        scale = 1000 if text.endswith("k") else 1
        try:
            value = float(text.removesuffix("k")) * scale
        except ValueError:
            value = 0.0
        if value <= 0 or value != int(value):
            raise DataError(
                f"reading the table {self.path}: line {self.line}, column {column}: {self.text(column)!r} is no "
                "positive whole number"
            )
        return int(value)

    def said(self, column: str, *in_note: str) -> str:
        """What a column says of the software, in lower case; without that column what `note` does, as `key=value`."""
        if text := self.text(column):
            return text.lower()
        for key in in_note:
            if found := re.search(rf"(?:^|;)\s*{re.escape(key)}\s*=\s*([^;]+)", self.text("note"), re.IGNORECASE):
                return found.group(1).strip().lower()
        return ""

    def switch(self, column: str, *in_note: str) -> bool | None:
        """Whether it is on; None where nothing is said. Raises DataError for other words than yes and no."""
        said = self.said(column, *in_note)
        if not said:
            return None
        if said not in (*YES, *NO):
            raise DataError(
                f"reading the table {self.path}: line {self.line}, column {column}: {said!r} is none of "
                f"{', '.join((*YES, *NO))}"
            )
        return said in YES

    def number_or(self, column: str, default: int) -> int:
        """A number, or the default, which is noted."""
        value = self.number(column)
        if value is None:
            self.assumed.append(f"{column}={default}")
            return default
        return value
