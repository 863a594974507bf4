"""Detection of repeated rows, contradicting rows, and training rows that are also held out.

Of each row 16 bytes are kept on disk, of a pair or a labelled answer 24, and compared by shares that fit in memory.
"""

import hashlib
import json
import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stages.core.errors import DataError
from stages.data.files import FilePart, RowLocation
from stages.data.messages import Document, fields_of

ROW_DIGESTS = "rows.bin"
"""Name of the file, in a folder of packed rows, with a digest of each row's training content: uint64 [rows read]."""
# An odd number of backslashes before the escape: in pairs they stand for backslashes themselves.
CONTROL_CHARACTER = re.compile(r"\\(?<!\\\\)(?:\\\\)*(u00[0189][0-9a-f]|u007f|u202[a-e]|u206[6-9]|[bf])")
"""Pattern of JSON-escaped control characters and changes of writing direction; not of line ends and tabs."""
MEDIA = re.compile(r"<(?:image|video|audio)>")
"""Pattern of the placeholders `<image>`, `<video>` and `<audio>`, which show that a row refers to missing media."""
SHARE_ROWS = 1 << 22
"""Number of row digests that are compared at a time, which takes 160 MiB of memory."""
REMARKABLE = {"control": CONTROL_CHARACTER, "media": MEDIA}
SHOWN = {"control": "{} (\\{})", "media": "{} ({})"}
LABEL = 1
"""Lowest bit of a labelled answer's digest, which holds the label (good or bad)."""
CONTRADICTING_PAIRS = "pairs contradict another, in which the rejected answer is the chosen one"
CONTRADICTING_LABELS = "labelled answers contradict another, which gives the same answer the other label"
CONTROL_CHARACTERS_FOUND = "control characters, which are learned as they are"
MEDIA_FOUND = "what stands for pictures or sound, which is learned as text"


class RowDigests:
    """Digests of the good rows in one part of a data file, to find repeated and contradicting rows."""

    def __init__(self) -> None:
        self.digests = array("Q")
        self.swapped = array("Q")
        """Digests of rows that would contradict: pairs with swapped answers, or answers with the other label."""
        self.numbers = array("Q")
        self.remarkable: dict[str, tuple[int, int, str]] = {}
        """Number of rows, first row and an example of suspicious content (control characters, media placeholders)."""

    def add(self, number: int, documents: Sequence[Document], is_good: bool | None = None) -> None:
        """Add the digest of a dataset row, to find repeated rows. is_good: label of a labelled answer."""
        texts = [json.dumps(fields_of(document), sort_keys=True, default=sorted) for document in documents]
        self.numbers.append(number)
        digest = _digest(texts)
        if is_good is not None:
            # The lowest bit is the label, so an answer and its contradiction differ by that bit alone.
            digest = digest & ~LABEL | is_good
            self.swapped.append(digest ^ LABEL)
        elif len(texts) > 1:
            self.swapped.append(_digest(texts[::-1]))
        self.digests.append(digest)
        whole = "".join(texts)
        for name, pattern in REMARKABLE.items():
            if found := pattern.search(whole):
                # Group 1 where the pattern has one, else group 0, the whole match.
                count, first, example = self.remarkable.get(name, (0, number, found[found.re.groups]))
                self.remarkable[name] = count + 1, first, example


class SeenRows:
    """Collector of the digests of all rows of a dataset, to find repeated and contradicting rows."""

    def __init__(self, folder: Path, *, is_labelled: bool = False) -> None:
        self._contradiction = CONTRADICTING_LABELS if is_labelled else CONTRADICTING_PAIRS
        self._digests = folder / ROW_DIGESTS
        self._swapped = folder / "swapped.bin"
        self._numbers = folder / "numbers.bin"
        self._begins: list[tuple[int, FilePart]] = []
        self._num_rows = 0
        self._remarkable: dict[str, tuple[int, str]] = {}
        for path in (self._digests, self._swapped, self._numbers):
            path.touch()

    def add(
        self,
        part: FilePart,
        digests: NDArray[np.uint64],
        swapped: NDArray[np.uint64],
        numbers: NDArray[np.uint64],
        remarkable: Mapping[str, tuple[int, int, str]],
    ) -> None:
        self._begins.append((self._num_rows, part))
        self._num_rows += len(digests)
        for path, values in ((self._digests, digests), (self._swapped, swapped), (self._numbers, numbers)):
            with path.open("ab") as stream:
                stream.write(values.tobytes())
        for name, (count, number, example) in remarkable.items():
            before, shown = self._remarkable.get(name, (0, ""))
            self._remarkable[name] = before + count, shown or SHOWN[name].format(part.place(number), example)

    def warnings(self) -> Iterator[str]:
        """Yield a warning for repeated, contradicting and suspicious rows, each with the number of rows and a place."""
        digests, swapped = _mapped(self._digests), _mapped(self._swapped)
        if len(digests) == 1:
            yield "there is one row only, which is learned again and again"
        repeated, contradicting = _compared(digests, swapped)
        if repeated.count:
            yield (
                f"{repeated.count} of {len(digests)} rows repeat an earlier one, and are learned as often as they are "
                f"there: {self._place(repeated.first)} is {self._place(repeated.earlier)} again"
            )
        if contradicting.count:
            yield (
                f"{contradicting.count} of {len(digests)} {self._contradiction}: "
                f"{self._place(contradicting.first)} and {self._place(contradicting.earlier)}"
            )
        for name, sentence in (("control", CONTROL_CHARACTERS_FOUND), ("media", MEDIA_FOUND)):
            if name in self._remarkable:
                count, place = self._remarkable[name]
                yield f"{count} of {len(digests)} rows hold {sentence}: {place}"

    def close(self) -> None:
        """Delete the temporary files of the search for repeated rows; the row digests stay with the packed rows."""
        self._swapped.unlink()
        self._numbers.unlink()

    def _place(self, row: int) -> RowLocation:
        at = bisect_right(self._begins, row, key=lambda entry: entry[0]) - 1
        return self._begins[at][1].place(int(_mapped(self._numbers)[row]))


@dataclass
class _Found:
    """Number of repeated or contradicting rows, with the number of the first one and of the row that it matches."""

    count: int = 0
    first: int = sys.maxsize
    earlier: int = 0


def _compared(digests: NDArray[np.uint64], swapped: NDArray[np.uint64]) -> tuple[_Found, _Found]:
    """Return counts of rows that repeat an earlier row, and of rows that contradict another; uint64 [rows]."""
    repeated, contradicting = _Found(), _Found()
    for share in range(num_shares := -(-len(digests) // SHARE_ROWS)):  # rounded up
        rows, values = _share(digests, share, num_shares)
        # `np.unique` returns the first place of each value; all other places are repetitions.
        first_places = np.unique(values, return_index=True)[1]
        again = np.ones(len(rows), bool)
        again[first_places] = False
        if again.any():
            repeated.count += int(again.sum())
            # `argmax` of booleans is the first True; a share keeps the order of the rows.
            at = int(again.argmax())
            if rows[at] < repeated.first:
                repeated.first, repeated.earlier = int(rows[at]), int(rows[(values == values[at]).argmax()])
        swapped_rows, swapped_values = _share(swapped, share, num_shares)
        found = swapped_rows[np.isin(swapped_values, values)]
        if len(found):
            contradicting.count += len(found)
            if found[0] < contradicting.first:
                contradicting.first = int(found[0])
                contradicting.earlier = int(rows[(values == swapped[contradicting.first]).argmax()])
    return repeated, contradicting


def _share(digests: NDArray[np.uint64], share: int, num_shares: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the rows whose digests have one remainder, to bound memory: row numbers int64, digests uint64."""
    blocks = range(0, len(digests), SHARE_ROWS)
    rows = [
        begin + np.flatnonzero(digests[begin : begin + SHARE_ROWS] % np.uint64(num_shares) == share) for begin in blocks
    ]
    numbers = np.concatenate([np.zeros(0, np.int64), *rows])
    return numbers, digests[numbers]


def check_held_out(training: Path, evaluation: Path) -> str | None:
    """Return a warning if training rows are among the held-out rows; raise DataError when all of the latter are."""
    learned, held_out = (_mapped(folder / ROW_DIGESTS) for folder in (training, evaluation))
    is_learned = np.zeros(len(held_out), bool)
    for begin in range(0, len(learned), SHARE_ROWS):
        is_learned |= np.isin(held_out | LABEL, learned[begin : begin + SHARE_ROWS] | LABEL)  # whatever its label says
    num_learned = int(is_learned.sum())
    if not num_learned:
        return None
    found = f"{num_learned} of {len(held_out)} held-out rows are among the training rows too"
    if num_learned == len(held_out):
        raise DataError(f"{found}, so nothing is held out; take rows that are not learned, or none")
    return f"{found}: the held-out loss is lower than it should be"


def rows_in_any_order(folder: Path) -> tuple[int, ...]:
    """Return a fingerprint of a dataset's rows that ignores their order: count, sum and sum of squares of digests."""
    digests = _mapped(folder / ROW_DIGESTS)
    # Sums and squares of uint64 wrap around at 2**64, which changes nothing for equal sets of rows.
    blocks = [digests[begin : begin + SHARE_ROWS] for begin in range(0, len(digests), SHARE_ROWS)]
    return len(digests), sum(int(one.sum()) for one in blocks), sum(int((one * one).sum()) for one in blocks)


def _mapped(path: Path) -> NDArray[np.uint64]:
    """Return the row digests in a file as a memory-mapped array, so that only what is read takes memory."""
    return np.asarray(np.memmap(path, np.uint64, "r")) if path.stat().st_size else np.zeros(0, np.uint64)


def _digest(texts: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(texts).encode(), digest_size=8).digest(), "little")
