"""Interface of training losses: micro-batches give parts that add up to means over the global batch in any layout.

A loss counts things in a micro-batch (pairs, target tokens, …). The engine adds these counts up over the global batch,
before the forward pass, and gives the totals to the loss, which maps the log-probabilities of a micro-batch's targets
to its part of the mean and of the metrics. All parts add up to the mean: so the number of processes and of
micro-batches does not change what is learned, whatever each term is a mean over. The losses are in
`stages.kinds.train.methods`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from stages.data.batch import Batch, Signal
from stages.parallel.accelerator import in_float64

Counts = dict[str, int]
"""Numbers of things that a loss averages over, such as tokens or pairs, in a micro-batch, by kind."""
Totals = Mapping[str, float]
"""Numbers of things that a loss averages over, such as tokens or pairs, in a global batch, by kind."""
Parts = tuple[Tensor, dict[str, Tensor]]
"""Parts that a micro-batch adds to global means: of the loss, differentiable, and of each metric, by name."""


class Loss(Protocol):
    """Loss function of a training method, as training engines call it."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the loss's metrics, in order; processes that do not compute the loss need their number."""

    def counts(self, signal: Signal) -> Counts:
        """Return how many things of each kind (tokens, pairs, …) the loss averages over in a micro-batch.

        All kinds are there, always.
        """

    def __call__(self, token_log_probabilities: Tensor, signal: Signal, totals: Totals) -> Parts:
        """Return the parts that a micro-batch adds to the mean loss and to its metrics.

        `token_log_probabilities` is float32 [rows, sequence], 0 where there is no target; of a batch with k candidates
        [rows, sequence, 1 + k], the target's first. A metric that is a mean over nothing is NaN, and not logged.
        """


def totals_of(loss: Loss, micro_batches: Sequence[Batch], add_up: Callable[[Tensor], Tensor]) -> Totals:
    """Return how many things of each kind (tokens, pairs, …) a loss averages over in the global batch.

    add_up: sums float64 values over the data-parallel shares.
    """
    counts = [loss.counts(batch.signal) for batch in micro_batches]
    names = list(counts[0])
    own = torch.tensor([sum(one[name] for one in counts) for name in names], dtype=torch.float64)
    return dict(zip(names, add_up(own).tolist(), strict=True))


def stacked(parts: Parts) -> Tensor:
    """Return a micro-batch's parts of loss and metrics, detached, as float64 [1 + number of metrics], to be summed."""
    loss, metrics = parts
    return in_float64(torch.stack([loss.detach(), *metrics.values()]))


def means(added_up: Tensor, loss: Loss) -> tuple[float, dict[str, float]]:
    """Return the mean loss and metrics of a global batch from the sum of all parts, without metrics that are NaN."""
    value, *metrics = added_up.tolist()
    named = zip(loss.metric_names, metrics, strict=True)
    return value, {name: metric for name, metric in named if not math.isnan(metric)}
