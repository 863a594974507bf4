"""Rows → those that say nearly the same as an earlier one, by MinHash, and then exactly.

A row is the set of its runs of words; how alike two rows are is the Jaccard similarity |A ∩ B| / |A ∪ B| of theirs.
MinHash (Broder 1997) keeps, for each of `NUM_HASHES` hash functions, the smallest value of a set: two sets share such a
value with a probability that is their similarity. Locality-sensitive hashing looks only at pairs that share all values
of one of several bands, and these are compared by the sets themselves: what is found is never wrong, and of pairs as
alike as asked for, one in 200 is missed at most. Written with numpy, since 60 lines are a fourth of the time of
`datasketch`, which makes a Python object of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.curate.kept_files import KeptFiles
from stages.curate.words import WORD_OR_SIGN, Hashes, hashes_of, runs_of, words_of

RUNS, ENDS, SIGNATURES = "runs.bin", "ends.bin", "signatures.bin"
RUN_BYTES = 8
NUM_HASHES = 128
FOUND = 0.995
"""Probability that two rows, as alike as asked for, are compared."""
ESTIMATE_MARGIN = 0.2
"""By which the share of common smallest values may lie below the similarity: over 4 standard deviations."""
CHUNK_RUNS = 4096
SEED = 0

Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Repeats:
    """Of each row: which earlier one it repeats, its own number where it repeats none; and how alike they are."""

    of: NDArray[np.int64]
    similarity: NDArray[np.float32]


def set_of(parts: tuple[tuple[str, ...], ...], label: bool | None, num_words: int) -> Hashes:
    """The sorted set of a row's runs of words. parts: as `ReadRow` has them.

    A chosen answer is not the same as a rejected one, nor a good one as a bad one of the same words.
    """
    found = []
    for number, texts in enumerate(parts):
        hashes = hashes_of([word for text in texts for word in words_of(text, WORD_OR_SIGN)])
        runs = runs_of(hashes, min(num_words, len(hashes))) if len(hashes) else hashes
        found.append(runs + np.uint64(2 * number + (label is False)))
    return np.unique(np.concatenate(found))


class Sets:
    """Sets of rows, in `FILES`: what is in memory does not grow with what rows say."""

    FILES = (RUNS, ENDS, SIGNATURES)

    def __init__(self, files: KeptFiles) -> None:
        self._files = files
        self._end = files[RUNS].tell() // RUN_BYTES
        draw = np.random.Generator(np.random.PCG64(SEED))
        self._factors = draw.integers(0, 2**63, NUM_HASHES, np.uint64) * np.uint64(2) + np.uint64(1)
        self._offsets = draw.integers(0, 2**63, NUM_HASHES, np.uint64)

    def add(self, runs: Hashes) -> None:
        """The next row's."""
        self._end += len(runs)
        self._files[RUNS].write(runs.tobytes())
        self._files[ENDS].write(np.uint64(self._end).tobytes())
        self._files[SIGNATURES].write(self._signature(runs).tobytes())

    def _signature(self, runs: Hashes) -> NDArray[np.uint32]:
        """[NUM_HASHES]: the smallest value of each hash function (multiply, add, shift)."""
        smallest = np.full(NUM_HASHES, 2**32 - 1, np.uint32)
        for start in range(0, len(runs), CHUNK_RUNS):
            values = runs[start : start + CHUNK_RUNS, None] * self._factors + self._offsets
            smallest = np.minimum(smallest, (values >> np.uint64(32)).min(axis=0).astype(np.uint32))
        return smallest


class Comparison:
    """The rows of `Sets`, compared with one another."""

    def __init__(self, folder: Path, threshold: float) -> None:
        self._ends = _read(folder / ENDS, np.uint64).astype(np.int64)
        self._runs = _read(folder / RUNS, np.uint64)
        self._signatures = _read(folder / SIGNATURES, np.uint32).reshape(-1, NUM_HASHES)
        self._threshold = threshold
        self._says_something = np.diff(self._ends, prepend=0) > 0

    def repeats(self, kept: NDArray[np.bool_], report: Report) -> Repeats:
        """Of the rows that are `kept`, each that says nearly the same as one before it that repeats none itself; the
        first such is named.
        """
        rows = np.flatnonzero(kept & self._says_something)
        links = self._linked(rows)
        of = np.arange(len(self._ends))
        similarity = np.zeros(len(of), np.float32)
        for number in map(int, rows):
            report(number, len(of))
            for candidate in self._alike(number, _first_ones(number, of, links)):
                found = self._similarity(number, candidate)
                if found >= self._threshold:
                    of[number], similarity[number] = candidate, found
                    break
        return Repeats(of, similarity)

    def groups(self, kept: NDArray[np.bool_], report: Report) -> NDArray[np.int64]:
        """[rows]: of each row that is `kept`, the first of those that it is alike to, directly or by way of others."""
        rows = np.flatnonzero(kept & self._says_something)
        links = self._linked(rows)
        first = np.arange(len(self._ends))

        def find(row: int) -> int:
            while first[row] != row:
                first[row] = first[first[row]]
                row = int(first[row])
            return row

        for number in map(int, rows):
            report(number, len(first))
            others = {row for row in _before(number, links) if find(row) != find(number)}
            for other in self._alike(number, iter(others)):
                if find(other) != find(number) and self._similarity(number, other) >= self._threshold:
                    low, high = sorted((find(other), find(number)))
                    first[high] = low
        return np.array([find(row) for row in range(len(first))], np.int64)

    def _linked(self, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Of each band, each row's predecessor with the same values there; -1 where there is none."""
        num_values = values_per_band(self._threshold)
        found = []
        for band in range(NUM_HASHES // num_values):
            values = np.ascontiguousarray(self._signatures[rows, band * num_values : (band + 1) * num_values])
            keys = runs_of(values.astype(np.uint64).ravel(), num_values)[::num_values]
            order = np.argsort(keys, kind="stable")
            same = keys[order[1:]] == keys[order[:-1]]
            previous = np.full(len(self._ends), -1, np.int64)
            previous[rows[order[1:][same]]] = rows[order[:-1][same]]
            found.append(previous)
        return found

    def _alike(self, number: int, candidates: Iterator[int]) -> list[int]:
        """Those that may well be as alike as asked for, in their order."""
        found = np.unique(np.fromiter(candidates, np.int64))
        if not len(found):
            return []
        estimates = (self._signatures[found] == self._signatures[number]).mean(axis=1)
        return [int(one) for one in found[estimates >= self._threshold - ESTIMATE_MARGIN]]

    def _similarity(self, one: int, other: int) -> float:
        first, second = (self._runs[self._start(row) : self._ends[row]] for row in (one, other))
        num_common = len(np.intersect1d(first, second, assume_unique=True))
        return num_common / (len(first) + len(second) - num_common)

    def _start(self, row: int) -> int:
        return int(self._ends[row - 1]) if row else 0


def _first_ones(number: int, of: NDArray[np.int64], links: Sequence[NDArray[np.int64]]) -> Iterator[int]:
    """Earlier rows that share a band and repeat none; links over those that do are shortened on the way."""
    for previous in links:
        other = number
        while other >= 0:
            before = int(previous[other])
            while before >= 0 and of[before] != before:
                before = int(previous[before])
            previous[other] = before
            if before >= 0:
                yield before
            other = before


def _before(number: int, links: Sequence[NDArray[np.int64]]) -> Iterator[int]:
    """Earlier rows that share a band."""
    for previous in links:
        other = int(previous[number])
        while other >= 0:
            yield other
            other = int(previous[other])


def values_per_band(threshold: float) -> int:
    """As many as still find a pair of this similarity: 1 - (1 - tᵛ)ᵇ ≥ `FOUND`, of b bands of v values."""
    return next(
        values for values in range(NUM_HASHES, 0, -1) if 1 - (1 - threshold**values) ** (NUM_HASHES // values) >= FOUND
    )


def _read(path: Path, kind: type) -> NDArray[Any]:
    """A file's array, read from the disk where it is needed."""
    return np.memmap(path, kind, mode="r") if path.stat().st_size else np.zeros(0, kind)
