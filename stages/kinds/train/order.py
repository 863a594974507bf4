"""Order of training rows, of one dataset or a mixture: a pure function of the seed and the step.

So an interrupted run needs no stored position, and every layout sees the same global batches.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stages.core.errors import DataError
from stages.data.config import DataConfig
from stages.data.dataset import PackedDataset
from stages.data.mixture import MixtureOrder
from stages.kinds.train.config import TrainConfig


@dataclass(frozen=True)
class DataOrder:
    """Order of training rows: a random permutation for each epoch, cut into global batches that may span epochs.

    A mixture draws from each dataset by weight.
    """

    num_rows: int
    global_batch_size: int
    micro_batch_size: int
    data_rank: int
    data_parallel_size: int
    seed: int
    mixture: MixtureOrder | None = None
    """Order in which a mixture's datasets are drawn from; None for a single dataset of `num_rows` rows."""
    cost: Callable[[int], float] | None = None
    """Cost of a row, by which processes get rows of a global batch; None: in the order of the rows."""

    def global_batch(self, step: int) -> list[int]:
        """Return the row numbers of optimizer step `step`, counted from 1."""
        return self.slots.rows((step - 1) * self.global_batch_size, self.global_batch_size)

    def rows(self, num_steps: int) -> list[int]:
        """Return the sorted numbers of the rows that the first `num_steps` steps learn from."""
        return np.flatnonzero(self.slots.times(num_steps * self.global_batch_size)).tolist()

    def micro_batches(self, step: int) -> list[list[int]]:
        """Return the row numbers of this process's share of a global batch, cut into micro-batches."""
        num_rows = self.global_batch_size // self.data_parallel_size
        if self.cost and self.data_parallel_size > 1:
            rows = self.global_batch(step)
            shares = dealt([*map(self.cost, rows)], self.micro_batch_size, self.data_parallel_size)
            return [[rows[place] for place in share] for share in shares[self.data_rank]]
        share = self.global_batch(step)[self.data_rank * num_rows :][:num_rows]
        return [share[start : start + self.micro_batch_size] for start in range(0, num_rows, self.micro_batch_size)]

    @property
    def slots(self) -> MixtureOrder:
        """Order in which training visits the rows of one dataset or a mixture; each step takes the next rows."""
        return self.mixture or MixtureOrder((self.num_rows,), (1.0,), self.seed)


def dealt(costs: Sequence[float], micro_batch_size: int, num_ranks: int) -> list[list[list[int]]]:
    """Return for each rank its micro-batches as places in `costs`, of which each rank gets as many.

    Ranks wait for each other in every micro-batch, so costs are even within one: the dearest rows make the first, and
    in each the dearest row left goes to the rank with the least so far that has room.
    """
    order = sorted(range(len(costs)), key=lambda place: (-costs[place], place))
    shares: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    stride = micro_batch_size * num_ranks
    for begin in range(0, len(order), stride):
        together = order[begin : begin + stride]
        room, sums = len(together) // num_ranks, [0.0] * num_ranks
        for share in shares:
            share.append([])
        for place in together:
            rank = min(
                (one for one in range(num_ranks) if len(shares[one][-1]) < room), key=lambda one: (sums[one], one)
            )
            shares[rank][-1].append(place)
            sums[rank] += costs[place]
    return shares


def even_micro_batches(
    num_rows: int, micro_batch_size: int, data_rank: int, data_parallel_size: int
) -> Iterator[list[int]]:
    """Yield one process's micro-batches as row numbers; every process gets the same number, the last may be empty."""
    stride = micro_batch_size * data_parallel_size
    for index in range(math.ceil(num_rows / stride)):
        start = index * stride + data_rank * micro_batch_size
        # 5 rows in micro-batches of 2 on 2 processes: [0, 1], [4] on rank 0, [2, 3], [] on rank 1
        yield list(range(min(start, num_rows), min(start + micro_batch_size, num_rows)))


def slots_of(data: DataConfig, training: PackedDataset, seed: int) -> MixtureOrder:
    """Return each mixture dataset's share and number of passes, as metrics, after `num_slots` visited rows."""
    if not training.members or data.mixing.strategy == "concat":
        return MixtureOrder((len(training),), (1.0,), seed)
    asked = shares_asked(data, training)
    lengths = training.row_lengths
    # Weights by tokens become weights by rows: a dataset of long rows needs fewer of them.
    per_row = [
        lengths[rows.start : rows.stop].mean() if data.mixing.weight_by == "tokens" else 1.0
        for rows in training.member_rows.values()
    ]
    of_rows = np.array(list(asked.values())) / per_row
    sizes = tuple(len(rows) for rows in training.member_rows.values())
    return MixtureOrder(sizes, tuple((of_rows / of_rows.sum()).tolist()), seed)


def shares_asked(data: DataConfig, training: PackedDataset) -> dict[str, float]:
    """Return the share of each dataset that a mixture asks for, of rows or tokens as `weight_by` says; the sum is 1."""
    weights = np.array([part.weight or 0.0 for part in data.datasets])
    if not weights.all():
        everything = np.ones(len(training), np.int64)
        sizes = _amounts(training, everything, data.mixing.weight_by)
        # above 1 a temperature evens out sizes: 100 and 1 at temperature 2 -> 10 and 1
        weights = sizes ** (1 / data.mixing.temperature)
    return dict(zip(training.members, (weights / weights.sum()).tolist(), strict=True))


def seen(data: DataConfig, training: PackedDataset, slots: MixtureOrder, num_slots: int) -> dict[str, float]:
    """Return, as metrics, each mixture dataset's share and passes so far, after `num_slots` visited rows."""
    if not training.members:
        return {}
    times = slots.times(num_slots)
    amounts = _amounts(training, times, data.mixing.weight_by)
    shares = zip(training.members, (amounts / amounts.sum()).tolist(), strict=True)
    passes = {name: float(times[rows.start : rows.stop].mean()) for name, rows in training.member_rows.items()}
    return {f"share_seen.{name}": share for name, share in shares} | {
        f"epochs.{name}": number for name, number in passes.items()
    }


def steps_of_epochs(config: TrainConfig, training: PackedDataset) -> int:
    """Return the number of optimizer steps in the recipe's `epochs`; an epoch has the rows of all datasets together."""
    return math.ceil(config.epochs * len(training) / config.global_batch_size)


def repeated_too_often(config: TrainConfig, training: PackedDataset) -> Iterator[tuple[str, DataError]]:
    """Yield config field and error for each dataset that training would repeat more often than its `max_epochs`."""
    data, num_steps = config.data, config.steps or steps_of_epochs(config, training)
    times = slots_of(data, training, config.seed).times(num_steps * config.global_batch_size)
    members = zip(data.datasets, data.names, training.member_rows.values(), strict=True) if data.datasets else ()
    for number, (part, name, rows) in enumerate(members):
        passes = float(times[rows.start : rows.stop].mean())
        if part.max_epochs is not None and passes > part.max_epochs:
            yield (
                f"datasets.{number}.max_epochs",
                DataError(
                    f"the training would pass {passes:.3g} times through the {len(rows)} packed rows of {name}, whose "
                    f"`max_epochs` is {part.max_epochs:g}; lower its weight, train for fewer steps, add rows, or raise "
                    "`max_epochs`"
                ),
            )


def _amounts(training: PackedDataset, times: NDArray[np.int64], unit: str) -> NDArray[np.float64]:
    """Return how many rows or tokens are taken from each dataset, float64 [datasets]. times: visits of each row."""
    counted = times * training.row_lengths if unit == "tokens" else times
    return np.array([counted[rows.start : rows.stop].sum() for rows in training.member_rows.values()], np.float64)
