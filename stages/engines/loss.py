"""Interface of training losses, which add up over micro-batches to exact means over the global batch.

A loss counts things in a micro-batch (pairs, target tokens, …). The engine adds these counts up over the global batch,
before the forward pass, and gives the totals to the loss, which maps the log-probabilities of a micro-batch's targets
to its part of the mean and of the metrics: so the number of processes and of micro-batches does not change what is
learned. The losses are in `stages.kinds.train.methods`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from stages.data.batch import Batch, Signal
from stages.parallel.accelerator import in_float64

Counts = dict[str, int]
"""Denominators of a loss's means in a micro-batch: numbers of tokens, preference pairs and the like, by kind."""
Totals = Mapping[str, Tensor | float]
"""Denominators of a loss's means in a global batch: numbers of tokens, preference pairs and the like, by kind.

From an engine they are float32 tensors of no dimension on its device: a loss divides by them without reading them."""
Parts = tuple[Tensor, dict[str, Tensor]]
"""Shares that a micro-batch adds to the global batch's mean loss (differentiable) and to its mean metrics, by name."""


class Loss(Protocol):
    """Loss function of a training method, as training engines call it."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the loss's metrics, in order, also for processes that do not compute the loss."""

    def counts(self, signal: Signal) -> Counts:
        """Return all numbers that the loss averages over in a micro-batch, such as tokens or pairs, by kind."""

    def __call__(self, token_log_probabilities: Tensor, signal: Signal, totals: Totals) -> Parts:
        """Return the shares that a micro-batch adds to the global batch's mean loss and mean metrics.

        `token_log_probabilities` is float32 [rows, sequence], 0 where there is no target; of a batch with k candidates
        [rows, sequence, 1 + k], the target's first. A metric that is a mean over nothing is NaN, and not logged.
        """


def totals_of(loss: Loss, micro_batches: Sequence[Batch], add_up: Callable[[Tensor], Tensor]) -> Totals:
    """Return what the loss averages over in a global batch, as tensors that are not waited for.

    add_up: sums float64 values over data-parallel shares.
    """
    counts = [loss.counts(batch.signal) for batch in micro_batches]
    names = list(counts[0])
    # float64 holds every count exactly up to 2^53, fp32 only to 2^24.
    own = torch.tensor([sum(one[name] for one in counts) for name in names], dtype=torch.float64)
    return dict(zip(names, add_up(own).float().unbind(), strict=True))


def stacked(parts: Parts) -> Tensor:
    """Return a micro-batch's shares of loss and metrics as one tensor to be summed, float64 [1 + number of metrics]."""
    loss, metrics = parts
    # float64, so that a sum over many micro-batches and processes loses no digits of the fp32 parts.
    return in_float64(torch.stack([loss.detach(), *metrics.values()]))


def read(*tensors: Tensor) -> list[list[float]]:
    """Copy tensors of one device to the host all at once, waiting once; return each one's elements, flattened."""
    numbers = iter(torch.cat([in_float64(one).flatten() for one in tensors]).tolist())
    return [list(islice(numbers, one.numel())) for one in tensors]


def means(added_up: Sequence[float], loss: Loss) -> tuple[float, dict[str, float]]:
    """Return a global batch's mean loss and metrics, without NaN, from all micro-batches' summed shares."""
    value, *metrics = added_up
    named = zip(loss.metric_names, metrics, strict=True)
    return value, {name: metric for name, metric in named if not math.isnan(metric)}
