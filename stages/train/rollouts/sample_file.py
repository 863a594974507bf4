"""Completions for people to read: a line of JSON each, of all attempts of a stage; MLflow shows them as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from stages.core.contract import StageContext
from stages.core.files import remove_cut_off_line

COMPLETIONS_FILE = "completions.jsonl"
NUM_SHOWN = 4
"""Prompts of each sampling, and at most so many completions of each."""


class SampleFile:
    """Of rank 0 alone."""

    def __init__(self, context: StageContext) -> None:
        """Go on with what earlier attempts wrote, of which scratch alone is left; the artifact has the same file."""
        self._file = context.scratch / COMPLETIONS_FILE
        shown: Path = context.work / COMPLETIONS_FILE
        self._file.touch()
        remove_cut_off_line(self._file)
        shown.unlink(missing_ok=True)
        shown.hardlink_to(self._file)

    def write(self, lines: Iterable[dict[str, object]]) -> None:
        """Once more, where a step is sampled again after a kill."""
        with self._file.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
