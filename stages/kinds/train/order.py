"""Which rows a process learns from at which step: a pure function of the seed and the step.

Nothing has to be remembered to continue an interrupted run, and every layout sees the same global batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stages.data.mixture import MixtureOrder


@dataclass(frozen=True)
class DataOrder:
    """Epoch after epoch, each a random permutation of all rows, cut into global batches; of a mixture, each dataset's.

    A global batch may span the border of two epochs, so no row is left out of an epoch.
    """

    num_rows: int
    global_batch_size: int
    micro_batch_size: int
    data_rank: int
    data_parallel_size: int
    seed: int
    mixture: MixtureOrder | None = None
    """Of several datasets; default: one, of `num_rows` rows."""

    def global_batch(self, step: int) -> list[int]:
        """Row numbers of optimizer step `step`, counted from 1."""
        return self.slots.rows((step - 1) * self.global_batch_size, self.global_batch_size)

    def rows(self, num_steps: int) -> list[int]:
        """Numbers of the rows that so many steps learn from, sorted."""
        return np.flatnonzero(self.slots.times(num_steps * self.global_batch_size)).tolist()

    def micro_batches(self, step: int) -> list[list[int]]:
        """This process's share of a global batch, cut into micro-batches."""
        num_rows = self.global_batch_size // self.data_parallel_size
        share = self.global_batch(step)[self.data_rank * num_rows :][:num_rows]
        return [share[start : start + self.micro_batch_size] for start in range(0, num_rows, self.micro_batch_size)]

    @property
    def slots(self) -> MixtureOrder:
        """The rows of all steps, one after the other."""
        return self.mixture or MixtureOrder((self.num_rows,), (1.0,), self.seed)


def even_micro_batches(
    num_rows: int, micro_batch_size: int, data_rank: int, data_parallel_size: int
) -> Iterator[list[int]]:
    """All rows in order, dealt out to the processes; equally many micro-batches for each, the last ones maybe empty."""
    stride = micro_batch_size * data_parallel_size
    for index in range(math.ceil(num_rows / stride)):
        start = index * stride + data_rank * micro_batch_size
        yield list(range(min(start, num_rows), min(start + micro_batch_size, num_rows)))
