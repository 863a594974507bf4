"""Detection of benchmark contamination: rows that share word n-grams with benchmark samples, as in GPT-3's paper.

A row is left out for a run of 13 words (Brown et al. 2020, appendix C) that it shares with any text of a sample.
Samples of 8 to 12 words are searched as a whole, and for shorter questions whole texts of rows are compared, since 5
words stand in many texts that have seen no benchmark. Runs that most samples of a task have, such as instructions, do
not.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stages.core.redaction import shortened
from stages.data.any_rows import ReadRow
from stages.harnesses.harness import TaskItem
from stages.kinds.curate.config import Decontaminate
from stages.kinds.curate.words import Hashes, hashes_of, runs_of, words_of

SHORTEST_RUN = 8
"""Fewest words of an n-gram that is searched in rows to find benchmark questions, as in Brown et al. 2020."""
SHORTEST_WHOLE = 4
"""Fewest words of a benchmark question that is compared as a whole with a row's questions and with its full text."""
FEWEST_ITEMS = 10
"""Smallest number of samples of a task for n-grams in more than half of them to be ignored as instructions."""
SHOWN_CHARACTERS = 100


@dataclass(frozen=True)
class _Table:
    """Sorted hashes of all benchmark n-grams of one length, with the benchmark sample of each."""

    runs: Hashes
    items: NDArray[np.int64]

    def found(self, runs: Hashes) -> NDArray[np.int64]:
        """Return for each n-gram hash of a row the number of the benchmark sample that has the n-gram, or -1."""
        # A run larger than all others gets the place behind the last one; clipped, the comparison rejects it.
        at = np.searchsorted(self.runs, runs).clip(max=len(self.runs) - 1)
        return np.where(self.runs[at] == runs, self.items[at], -1)


class Benchmarks:
    """Word n-grams of all samples of the benchmark tasks, against which rows are checked."""

    def __init__(self, config: Decontaminate, items: Iterable[TaskItem]) -> None:
        self._config = config
        self._names: list[str] = []
        self._whole: dict[int, int] = {}
        self.num_too_short = 0
        """Number of benchmark samples that are not searched for in rows, because all their texts are too short."""
        self.num_common = 0
        """Number of benchmark n-grams that are ignored since most samples of their task contain them."""
        runs: dict[int, list[tuple[Hashes, NDArray[np.int64]]]] = defaultdict(list)
        for _, of_task in itertools.groupby(items, key=lambda item: item.task):
            for num_words, found in self._task(list(of_task)).items():
                runs[num_words].append(found)
        self._tables = {num_words: _joined(found) for num_words, found in sorted(runs.items())}

    @property
    def num_items(self) -> int:
        return len(self._names)

    def reason(self, row: ReadRow) -> str | None:
        """Return why a row counts as contaminated by a benchmark and is dropped; None if it is kept."""
        words = [word for texts in row.parts for text in texts for word in words_of(text)]
        hashes = hashes_of(words)
        for num_words, table in self._tables.items():
            items = table.found(runs_of(hashes, num_words))
            (at,) = np.nonzero(items >= 0)
            # A shorter run is a sample's whole text: one is enough.
            if len(at) >= (self._config.min_shared if num_words == self._config.words else 1):
                shown = shortened(" ".join(words[at[0] : at[0] + num_words]), SHOWN_CHARACTERS)
                return f"shares {len(at)} runs of {num_words} words with {self._names[items[at[0]]]}: “{shown}”"
        for text in (*row.asked, " ".join(text for texts in row.parts for text in texts)):
            item = self._whole.get(_whole(text))
            if item is not None:
                return f"asks what {self._names[item]} asks: “{shortened(' '.join(text.split()), SHOWN_CHARACTERS)}”"
        return None

    def _task(self, items: Sequence[TaskItem]) -> dict[int, tuple[Hashes, NDArray[np.int64]]]:
        """Return one benchmark task's n-gram hashes by n-gram length, each with the number of a sample that has it."""
        runs_by_length: dict[int, list[tuple[Hashes, int]]] = defaultdict(list)
        for item in items:
            number = len(self._names)
            self._names.append(f"sample {item.number} of {item.task}")
            by_length: dict[int, list[Hashes]] = defaultdict(list)
            for num_words, runs in self._runs_of(item):
                by_length[num_words].append(runs)
            for num_words, several in by_length.items():
                runs_by_length[num_words].append((np.unique(np.concatenate(several)), number))
            is_whole = list(map(self._keep_whole, item.questions, itertools.repeat(number)))
            self.num_too_short += not by_length and not any(is_whole)
        return {num_words: self._counted(several, len(items)) for num_words, several in runs_by_length.items()}

    def _runs_of(self, item: TaskItem) -> Iterator[tuple[int, Hashes]]:
        for text in (*item.questions, *item.texts):
            hashes = hashes_of(words_of(text))
            num_words = min(len(hashes), self._config.words)
            if num_words >= min(SHORTEST_RUN, self._config.words):
                yield num_words, runs_of(hashes, num_words)

    def _keep_whole(self, question: str, number: int) -> bool:
        is_kept = len(words_of(question)) >= SHORTEST_WHOLE
        if is_kept:
            self._whole.setdefault(_whole(question), number)
        return is_kept

    def _counted(self, several: Sequence[tuple[Hashes, int]], num_items: int) -> tuple[Hashes, NDArray[np.int64]]:
        """Remove n-grams that most samples of a task share; return the others, each with the number of a sample."""
        runs = np.concatenate([of_item for of_item, _ in several])
        items = np.concatenate([np.full(len(of_item), number) for of_item, number in several])
        # A run is in each item's array once, so its count is a number of samples.
        runs, first, counts = np.unique(runs, return_index=True, return_counts=True)
        is_common = (counts > num_items / 2) & (num_items >= FEWEST_ITEMS)
        self.num_common += int(is_common.sum())
        return runs[~is_common], items[first][~is_common]  # the first sample that has the run


def _joined(found: Sequence[tuple[Hashes, NDArray[np.int64]]]) -> _Table:
    runs, first = np.unique(np.concatenate([runs for runs, _ in found]), return_index=True)
    return _Table(runs, np.concatenate([items for _, items in found])[first])


def _whole(text: str) -> int:
    """Return one hash of all words of a text, to find rows that equal a benchmark question."""
    hashes = hashes_of(words_of(text))
    return int(runs_of(hashes, len(hashes))[0]) if len(hashes) else 0
