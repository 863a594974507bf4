"""What only all rows together show: repeated rows, pairs that contradict each other, rows that are held out as well.

Keeps 16 bytes a row, of a pair 24: memory for a hundred million rows, not for what they say.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stages.core.errors import DataError
from stages.data.documents import Document
from stages.data.files import Part, Place

ROW_DIGESTS = "rows.bin"
"""Beside the arrays of a folder of packed rows: uint64 [rows read], a digest of what each row teaches."""
CONTROL_CHARACTER = re.compile(r"(?<!\\)(?:\\\\)*\\(u00[0189][0-9a-f]|u007f|u202[a-e]|u206[6-9]|[bf])")
"""As JSON writes it down, those that turn the direction of writing among them; line ends and tabs have names of their
own, and are text.
"""
MEDIA = re.compile(r"<(?:image|video|audio)>")
"""What stands for a picture in rows that had one."""
REMARKABLE = {"control": CONTROL_CHARACTER, "media": MEDIA}
SHOWN = {"control": "{} (\\{})", "media": "{} ({})"}
CONTROL_CHARACTERS_FOUND = "control characters, which are learned as they are"
MEDIA_FOUND = "what stands for pictures or sound, which is learned as text"


class RowDigests:
    """Takes each good row of a part as it is read, under its number there."""

    def __init__(self) -> None:
        self.digests = array("Q")
        self.swapped = array("Q")
        """Of pairs, as they would be the other way round."""
        self.numbers = array("Q")
        self.remarkable: dict[str, tuple[int, int, str]] = {}
        """What some rows hold → how many of them, number of the first, what it has."""

    def add(self, number: int, documents: Sequence[Document]) -> None:
        """Note a row."""
        texts = [json.dumps(vars(document), sort_keys=True, default=sorted) for document in documents]
        self.numbers.append(number)
        self.digests.append(_digest(texts))
        if len(texts) > 1:
            self.swapped.append(_digest(texts[::-1]))
        whole = "".join(texts)
        for name, pattern in REMARKABLE.items():
            if found := pattern.search(whole):
                count, first, example = self.remarkable.get(name, (0, number, found[found.re.groups]))
                self.remarkable[name] = count + 1, first, example


class SeenRows:
    """The rows of all parts together."""

    def __init__(self) -> None:
        self._digests: list[NDArray[np.uint64]] = []
        self._swapped: list[NDArray[np.uint64]] = []
        self._numbers: list[NDArray[np.uint64]] = []
        self._begins: list[tuple[int, Part]] = []
        self._num_rows = 0
        self._remarkable: dict[str, tuple[int, str]] = {}

    def add(
        self,
        part: Part,
        digests: NDArray[np.uint64],
        swapped: NDArray[np.uint64],
        numbers: NDArray[np.uint64],
        remarkable: Mapping[str, tuple[int, int, str]],
    ) -> None:
        """What `RowDigests` has of a part that follows."""
        self._begins.append((self._num_rows, part))
        self._num_rows += len(digests)
        self._digests.append(digests)
        self._swapped.append(swapped)
        self._numbers.append(numbers)
        for name, (count, number, example) in remarkable.items():
            before, shown = self._remarkable.get(name, (0, ""))
            self._remarkable[name] = before + count, shown or SHOWN[name].format(part.place(number), example)

    def warnings(self) -> Iterator[str]:
        """What was found, each with its count and the first place."""
        digests = _joined(self._digests)
        if len(digests) == 1:
            yield "there is one row only, which is learned again and again"
        first_places = np.unique(digests, return_index=True)[1]
        if num_repeated := len(digests) - len(first_places):
            first = int(np.setdiff1d(np.arange(len(digests)), first_places)[0])
            again = int(np.flatnonzero(digests == digests[first])[0])
            yield (
                f"{num_repeated} of {len(digests)} rows repeat an earlier one, and are learned as often as they are "
                f"there: {self._place(first)} is {self._place(again)} again"
            )
        contradicting = np.flatnonzero(np.isin(_joined(self._swapped), digests))
        if len(contradicting):
            yield (
                f"{len(contradicting)} of {len(digests)} pairs contradict another, in which the rejected answer is "
                f"the chosen one: {self._place(int(contradicting[0]))}"
            )
        for name, sentence in (("control", CONTROL_CHARACTERS_FOUND), ("media", MEDIA_FOUND)):
            if name in self._remarkable:
                count, place = self._remarkable[name]
                yield f"{count} of {len(digests)} rows hold {sentence}: {place}"

    def write(self, folder: Path) -> None:
        """Leave the digests in a folder of packed rows."""
        with (folder / ROW_DIGESTS).open("wb") as stream:
            stream.writelines(digests.tobytes() for digests in self._digests)

    def _place(self, row: int) -> Place:
        at = bisect_right(self._begins, row, key=lambda entry: entry[0]) - 1
        begin, part = self._begins[at]
        return part.place(int(self._numbers[at][row - begin]))


def _joined(arrays: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    return np.concatenate([np.zeros(0, np.uint64), *arrays])


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
