"""Which rows a process learns from at which step: a pure function of the seed and the step.

Nothing has to be remembered to continue an interrupted run, and every layout sees the same global batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from stages.data.dataset import row_order


@dataclass(frozen=True)
class DataOrder:
    """Epoch after epoch, each a random permutation of all rows, cut into global batches.

    A global batch may span the border of two epochs, so no row is left out of an epoch.
    """

    num_rows: int
    global_batch_size: int
    micro_batch_size: int
    data_rank: int
    data_parallel_size: int
    seed: int

    def global_batch(self, step: int) -> list[int]:
        """Row numbers of optimizer step `step`, counted from 1."""
        start = (step - 1) * self.global_batch_size
        return [self._row(position) for position in range(start, start + self.global_batch_size)]

    def rows(self, num_steps: int) -> list[int]:
        """Numbers of the rows that so many steps learn from, sorted."""
        return sorted({row for step in range(1, num_steps + 1) for row in self.global_batch(step)})

    def micro_batches(self, step: int) -> list[list[int]]:
        """This process's share of a global batch, cut into micro-batches."""
        num_rows = self.global_batch_size // self.data_parallel_size
        share = self.global_batch(step)[self.data_rank * num_rows :][:num_rows]
        return [share[start : start + self.micro_batch_size] for start in range(0, num_rows, self.micro_batch_size)]

    def _row(self, position: int) -> int:
        epoch, index = divmod(position, self.num_rows)
        return int(_row_order(self.num_rows, self.seed, epoch)[index])


_row_order = lru_cache(maxsize=2)(row_order)


def even_micro_batches(
    num_rows: int, micro_batch_size: int, data_rank: int, data_parallel_size: int
) -> Iterator[list[int]]:
    """All rows in order, dealt out to the processes; equally many micro-batches for each, the last ones maybe empty."""
    stride = micro_batch_size * data_parallel_size
    for index in range(math.ceil(num_rows / stride)):
        start = index * stride + data_rank * micro_batch_size
        yield list(range(min(start, num_rows), min(start + micro_batch_size, num_rows)))
