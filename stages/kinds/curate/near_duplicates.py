"""Near-duplicate detection: finds rows with nearly the same words by MinHash, and confirms each exactly.

The similarity of two rows is the Jaccard similarity |A ∩ B| / |A ∪ B| of their sets of word runs. MinHash (Broder 1997)
keeps, for each of `NUM_HASHES` hash functions, the smallest value of a set: two sets share it with a probability that
is their similarity. Locality-sensitive hashing looks only at pairs that share all values of one of several bands, and
these are compared by the sets themselves: no reported pair is wrong, and of pairs with the requested similarity, one in
200 is missed at most. Takes a fourth of the time of `datasketch`, which makes a Python object of each row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stages.kinds.curate.spool import KeptFiles
from stages.kinds.curate.words import WORD_OR_SIGN, Hashes, hashes_of, runs_of, words_of

RUNS, ENDS, SIGNATURES = "runs.bin", "ends.bin", "signatures.bin"
RUN_BYTES = 8
NUM_HASHES = 128
FOUND = 0.995
"""Smallest probability with which MinHash bands find a pair of rows that has the requested similarity."""
ESTIMATE_MARGIN = 0.2
"""Margin (4 standard deviations) by which MinHash may underestimate a similarity that is still compared exactly."""
CHUNK_RUNS = 4096
SEED = 0

Report = Callable[[int, int], None]


@dataclass(frozen=True)
class NearDuplicatePairs:
    """Near-duplicates: each row's earlier row that it repeats (its own number if none), and their similarity."""

    of: NDArray[np.int64]
    similarity: NDArray[np.float32]


def set_of(parts: tuple[tuple[str, ...], ...], label: bool | None, num_words: int) -> Hashes:
    """Return the sorted set of a row's word n-gram hashes, by which rows are compared.

    parts: texts of each message, as in `ReadRow`. label: whether a labelled answer is good. A chosen answer differs
    from a rejected one, and a good one from a bad one, of the same words.
    """
    sets = []
    for number, texts in enumerate(parts):
        hashes = hashes_of([word for text in texts for word in words_of(text, WORD_OR_SIGN)])
        runs = runs_of(hashes, min(num_words, len(hashes))) if len(hashes) else hashes  # a short text is one run
        # Other values for each message's place and label: the same words elsewhere are not shared.
        sets.append(runs + np.uint64(2 * number + (label is False)))
    return np.unique(np.concatenate(sets))


class SignatureWriter:
    """Writer of each row's set of n-gram hashes and MinHash signature to files, so that memory stays small."""

    FILES = (RUNS, ENDS, SIGNATURES)

    def __init__(self, files: KeptFiles) -> None:
        self._files = files
        self._end = files[RUNS].tell() // RUN_BYTES  # not 0 when an attempt continues a killed one

    def add(self, runs: Hashes, signature: NDArray[np.uint32]) -> None:
        self._end += len(runs)
        self._files[RUNS].write(runs.tobytes())
        self._files[ENDS].write(np.uint64(self._end).tobytes())
        self._files[SIGNATURES].write(signature.tobytes())


class MinHash:
    """Hash functions of MinHash, the same in every process."""

    def __init__(self) -> None:
        draw = np.random.Generator(np.random.PCG64(SEED))
        # Odd factors: multiplication modulo 2^64 by an odd number maps different runs to different values.
        self._factors = draw.integers(0, 2**63, NUM_HASHES, np.uint64) * np.uint64(2) + np.uint64(1)
        self._offsets = draw.integers(0, 2**63, NUM_HASHES, np.uint64)

    def signature(self, runs: Hashes) -> NDArray[np.uint32]:
        """Return a MinHash signature [NUM_HASHES]: the smallest value of each hash function (multiply, add, shift)."""
        smallest = np.full(NUM_HASHES, 2**32 - 1, np.uint32)
        for start in range(0, len(runs), CHUNK_RUNS):
            values = runs[start : start + CHUNK_RUNS, None] * self._factors + self._offsets  # [runs, NUM_HASHES]
            # The upper half: modulo 2^64, low bits of a product depend on low bits alone.
            smallest = np.minimum(smallest, (values >> np.uint64(32)).min(axis=0).astype(np.uint32))
        return smallest


class JaccardComparison:
    """Comparison of rows by the Jaccard similarity of their n-gram sets."""

    def __init__(self, folder: Path, threshold: float) -> None:
        self._ends = _read(folder / ENDS, np.uint64).astype(np.int64)
        self._runs = _read(folder / RUNS, np.uint64)
        self._signatures = _read(folder / SIGNATURES, np.uint32).reshape(-1, NUM_HASHES)
        self._threshold = threshold
        self._says_something = np.diff(self._ends, prepend=0) > 0  # ends [3, 3, 7] -> sizes [3, 0, 4]

    def repeats(self, kept: NDArray[np.bool_], report: Report) -> NearDuplicatePairs:
        """Return the `kept` rows that are near-duplicates of an earlier, non-duplicate row, with the first such row."""
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
        return NearDuplicatePairs(of, similarity)

    def groups(self, kept: NDArray[np.bool_], report: Report) -> NDArray[np.int64]:
        """Return for each row the first row of its group of near-duplicates, int64 [rows].

        A group is linked by similar pairs. Of rows of the same set one is compared, and no row with its own group, so
        that with copies the time grows with the number of rows, not with its square.
        """
        rows = np.flatnonzero(kept & self._says_something)
        representatives = self._first_of_set(rows)
        links = self._linked(np.unique(representatives))
        groups = _Groups(len(self._ends), links)
        for number, representative in zip(rows.tolist(), representatives.tolist(), strict=True):
            report(number, len(self._ends))
            groups.join(number, representative)
            if number == representative:
                self._join_alike(number, groups, len(links))
        return np.array([groups.find(row) for row in range(len(self._ends))], np.int64)

    def _join_alike(self, number: int, groups: _Groups, num_bands: int) -> None:
        """Merge a row's near-duplicate group with those of all similar earlier rows.

        Only rows that share a MinHash band are compared, the next rows of each band together, twice as many in each
        round: after the first rounds most are of the row's own group, and passed over.
        """
        compared: set[int] = set()
        places, num_rows = [(band, number) for band in range(num_bands)], 1
        while places:
            candidates: set[int] = set()
            left = []
            for band, row in places:
                for _ in range(num_rows):
                    row = groups.before(band, row, number)
                    if row < 0:
                        break
                    candidates.add(row)
                else:
                    left.append((band, row))  # the band goes on beyond these
            for other in self._alike(number, iter(candidates - compared)):
                if groups.find(other) != groups.find(number) and self._similarity(number, other) >= self._threshold:
                    groups.join(number, other)
            compared |= candidates
            places, num_rows = left, 2 * num_rows

    def _first_of_set(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each given row the first row with exactly the same set of n-grams."""
        # Sets [a, b, a] of the rows [4, 5, 9] -> [4, 5, 4].
        sets = (self._runs[self._start(row) : self._ends[row]].tobytes() for row in rows.tolist())
        digests = b"".join(hashlib.blake2b(runs, digest_size=8).digest() for runs in sets)
        _, first, inverse = np.unique(np.frombuffer(digests, np.uint64), return_index=True, return_inverse=True)
        return rows[first[inverse]]

    def _linked(self, rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return, per MinHash band, each row's nearest earlier row with the same values, int64 [rows], or -1."""
        num_values = values_per_band(self._threshold)
        predecessors = []
        for band in range(NUM_HASHES // num_values):
            values = np.ascontiguousarray(self._signatures[rows, band * num_values : (band + 1) * num_values])
            # One hash for each row's values: every `num_values`-th run of the flattened array begins a row.
            keys = runs_of(values.astype(np.uint64).ravel(), num_values)[::num_values]
            # Equal keys side by side, rows ascending: keys [7, 5, 7, 7] -> predecessors [-1, -1, 0, 2].
            order = np.argsort(keys, kind="stable")
            same = keys[order[1:]] == keys[order[:-1]]
            previous = np.full(len(self._ends), -1, np.int64)
            previous[rows[order[1:][same]]] = rows[order[:-1][same]]
            predecessors.append(previous)
        return predecessors

    def _alike(self, number: int, candidates: Iterator[int]) -> list[int]:
        """Return, in ascending order, candidate rows that may be similar enough to a row, as MinHash estimates."""
        found = np.unique(np.fromiter(candidates, np.int64))
        if not len(found):
            return []
        estimates = (self._signatures[found] == self._signatures[number]).mean(axis=1)  # [candidates]
        return [int(row) for row in found[estimates >= self._threshold - ESTIMATE_MARGIN]]

    def _similarity(self, one: int, other: int) -> float:
        first, second = (self._runs[self._start(row) : self._ends[row]] for row in (one, other))
        num_common = len(np.intersect1d(first, second, assume_unique=True))  # as `set_of` made them
        return num_common / (len(first) + len(second) - num_common)

    def _start(self, row: int) -> int:
        return int(self._ends[row - 1]) if row else 0


def _first_ones(number: int, of: NDArray[np.int64], links: Sequence[NDArray[np.int64]]) -> Iterator[int]:
    """Yield earlier rows that share a MinHash band with a row and repeat none; shorten links to rows that do."""
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


class _Groups:
    """Groups of near-duplicate rows (union-find), named by their first row. links: predecessors per band, or -1."""

    def __init__(self, num_rows: int, links: Sequence[NDArray[np.int64]]) -> None:
        self._first = np.arange(num_rows)
        self._links = links
        self._beyond_group = [previous.copy() for previous in links]

    def find(self, row: int) -> int:
        first = self._first
        while first[row] != row:
            first[row] = first[first[row]]  # path halving
            row = int(first[row])
        return row

    def join(self, one: int, other: int) -> None:
        low, high = sorted((self.find(one), self.find(other)))
        self._first[high] = low

    def before(self, band: int, row: int, number: int) -> int:
        """Return the nearest row before `row` with its values in a MinHash band, not in `number`'s group, or -1."""
        group = self.find(number)
        other = self._beyond(band, row) if self.find(row) == group else int(self._links[band][row])
        while other >= 0 and self.find(other) == group:
            other = self._beyond(band, other)
        return other

    def _beyond(self, band: int, row: int) -> int:
        """Return the nearest earlier row of another group in a MinHash band, or -1; shorten skipped links."""
        previous, group = self._beyond_group[band], self.find(row)
        other = int(previous[row])
        while other >= 0 and self.find(other) == group:
            other = int(previous[other])
        previous[row] = other
        return other


def values_per_band(threshold: float) -> int:
    """Return the largest v with 1 - (1 - tᵛ)ᵇ ≥ `FOUND`, for the similarity t and b MinHash bands of v values."""
    return next(
        values for values in range(NUM_HASHES, 0, -1) if 1 - (1 - threshold**values) ** (NUM_HASHES // values) >= FOUND
    )


def _read(path: Path, kind: type) -> NDArray[Any]:
    # An empty file cannot be mapped.
    return np.memmap(path, kind, mode="r") if path.stat().st_size else np.zeros(0, kind)
