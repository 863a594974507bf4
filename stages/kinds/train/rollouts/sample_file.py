"""Completions for people to read: a line of JSON each, of all attempts of a stage; MLflow shows them as a table."""

from __future__ import annotations

import itertools
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
        self._has_written = False
        shown: Path = context.work / COMPLETIONS_FILE
        self._file.touch()
        remove_cut_off_line(self._file)
        shown.unlink(missing_ok=True)
        shown.hardlink_to(self._file)

    def write(self, step: int, lines: Iterable[dict[str, object]]) -> None:
        """Append the lines of a sampling, whose step they get; the steps of one attempt must rise.

        Its first sampling takes the place of what a killed attempt wrote after its last checkpoint, from this step on.
        """
        if not self._has_written:
            self._has_written = True
            self._remove_from(step)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps({"step": step, **line}, ensure_ascii=False) + "\n" for line in lines)

    def _remove_from(self, step: int) -> None:
        """Cut off the lines of this step and later ones, in place: the artifact's file is the same inode."""
        with self._file.open("r+b") as stream:
            earlier = itertools.takewhile(lambda line: json.loads(line)["step"] < step, stream.readlines())
            stream.truncate(sum(map(len, earlier)))
