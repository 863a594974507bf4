"""What an engine is given to minimise: a sum over what it gives log-probabilities of, so that any layout can add up.

A loss maps the log-probabilities of a micro-batch's targets to (sum of the loss, sums of the metrics). Both are to be
divided by the loss's count over the whole global batch, which is known before the forward pass; so the number of
processes and of micro-batches does not change what is learned. Which losses there are is for `stages.train.methods`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from stages.data.batch import Batch

Sums = tuple[Tensor, dict[str, Tensor]]
"""(sum of the loss, differentiable; sums of the metrics by name)"""


class Loss(Protocol):
    """What is minimised."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Of the sums beside the loss, in their order: a process without the loss must know how many there are."""

    def count(self, batch: Batch) -> int:
        """How many things the loss of this micro-batch sums over."""

    def __call__(self, token_log_probabilities: Tensor, batch: Batch) -> Sums:
        """Sums over the micro-batch; `token_log_probabilities` is float32 [rows, sequence], 0 where no target is."""
