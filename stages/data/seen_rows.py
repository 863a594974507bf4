"""What only all rows together show: repeated rows, pairs that contradict each other, rows that are held out as well.

Keeps 16 bytes a row, of a pair 24: memory for a hundred million rows, not for what they say.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stages.core.errors import DataError
from stages.data.documents import Document
from stages.data.files import Place

ROW_DIGESTS = "rows.bin"
"""Beside the arrays of a folder of packed rows: uint64 [rows read], a digest of what each row teaches."""
CONTROL_CHARACTER = re.compile(r"(?<!\\)(?:\\\\)*\\(u00[0189][0-9a-f]|u007f|u202[a-e]|u206[6-9]|[bf])")
"""As JSON writes it down, those that turn the direction of writing among them; line ends and tabs have names of their
own, and are text.
"""
MEDIA = re.compile(r"<(?:image|video|audio)>")
"""What stands for a picture in rows that had one."""


class SeenRows:
    """Takes each good row as it is read."""

    def __init__(self) -> None:
        self._digests = array("Q")
        self._swapped = array("Q")
        self._numbers = array("Q")
        self._files: list[tuple[int, Place]] = []
        self._num_with_control_characters = 0
        self._first_control_character = ""
        self._num_with_media = 0
        self._first_media = ""

    def add(self, place: Place, documents: Sequence[Document]) -> None:
        """Note a row."""
        texts = [json.dumps(vars(document), sort_keys=True, default=sorted) for document in documents]
        if not self._files or self._files[-1][1].file != place.file:
            self._files.append((len(self._numbers), place))
        self._numbers.append(place.number)
        self._digests.append(_digest(texts))
        if len(texts) > 1:
            self._swapped.append(_digest(texts[::-1]))
        if found := CONTROL_CHARACTER.search("".join(texts)):
            self._num_with_control_characters += 1
            self._first_control_character = self._first_control_character or f"{place} (\\{found[1]})"
        if found := MEDIA.search("".join(texts)):
            self._num_with_media += 1
            self._first_media = self._first_media or f"{place} ({found[0]})"

    def warnings(self) -> Iterator[str]:
        """What was found, each with its count and the first place."""
        if len(self._digests) == 1:
            yield "there is one row only, which is learned again and again"
        digests = np.asarray(self._digests)
        first_places = np.unique(digests, return_index=True)[1]
        if num_repeated := len(digests) - len(first_places):
            first = int(np.setdiff1d(np.arange(len(digests)), first_places)[0])
            again = int(np.flatnonzero(digests == digests[first])[0])
            yield (
                f"{num_repeated} of {len(digests)} rows repeat an earlier one, and are learned as often as they are "
                f"there: {self._place(first)} is {self._place(again)} again"
            )
        contradicting = np.flatnonzero(np.isin(np.asarray(self._swapped), digests))
        if len(contradicting):
            yield (
                f"{len(contradicting)} of {len(digests)} pairs contradict another, in which the rejected answer is "
                f"the chosen one: {self._place(int(contradicting[0]))}"
            )
        if self._num_with_control_characters:
            yield (
                f"{self._num_with_control_characters} of {len(digests)} rows hold control characters, which are "
                f"learned as they are: {self._first_control_character}"
            )
        if self._num_with_media:
            yield (
                f"{self._num_with_media} of {len(digests)} rows hold what stands for pictures or sound, which is "
                f"learned as text: {self._first_media}"
            )

    def write(self, folder: Path) -> None:
        """Leave the digests in a folder of packed rows."""
        (folder / ROW_DIGESTS).write_bytes(self._digests.tobytes())

    def _place(self, row: int) -> Place:
        at = bisect_right(self._files, row, key=lambda entry: entry[0]) - 1
        return replace(self._files[at][1], number=self._numbers[row])


def check_held_out(training: Path, evaluation: Path) -> str | None:
    """What to warn of when rows are learned that the other folder of packed rows holds out.

    Raises DataError when every held-out row is learned.
    """
    learned, held_out = _read(training), _read(evaluation)
    num_learned = int(np.isin(held_out, learned).sum())
    if not num_learned:
        return None
    found = f"{num_learned} of {len(held_out)} held-out rows are among the training rows too"
    if num_learned == len(held_out):
        raise DataError(f"{found}, so nothing is held out; take rows that are not learned, or none")
    return f"{found}: the held-out loss is lower than it should be"


def _read(folder: Path) -> NDArray[np.uint64]:
    return np.frombuffer((folder / ROW_DIGESTS).read_bytes(), np.uint64)


def _digest(texts: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(texts).encode(), digest_size=8).digest(), "little")
