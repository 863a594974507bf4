"""The loss of each dataset of a mixture beside that of all, in the same forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from stages.data.batch import Batch
from stages.engines.loss import Counts, Loss, Parts, Totals


@dataclass(frozen=True)
class LossByDataset:
    """A `Loss` with metrics `loss.NAME` and `METRIC.NAME`: means over the micro-batches of each dataset alone.

    A micro-batch holds rows of one dataset; its `member` says of which.
    """

    loss: Loss
    names: Sequence[str]

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Those of the loss, then those of each dataset."""
        own = self.loss.metric_names
        return (*own, *(f"{metric}.{name}" for name in self.names for metric in ("loss", *own)))

    def counts(self, batch: Batch) -> Counts:
        """As the loss does, of all and of each dataset."""
        counts = self.loss.counts(batch)
        by_dataset = {
            f"{what}.{number}": count if number == batch.member else 0
            for number in range(len(self.names))
            for what, count in counts.items()
        }
        return {**counts, **by_dataset}

    def __call__(self, token_log_probabilities: Tensor, batch: Batch, totals: Totals) -> Parts:
        """Parts of the means over all, and of those over the micro-batch's dataset."""
        loss, metrics = self.loss(token_log_probabilities, batch, totals)
        own_totals = {what: totals[f"{what}.{batch.member}"] for what in self.loss.counts(batch)}
        own = self.loss(token_log_probabilities, batch, own_totals)
        by_dataset = [
            value.detach() if number == batch.member else loss.new_zeros(())
            for number in range(len(self.names))
            for value in (own[0], *own[1].values())
        ]
        names = self.metric_names
        return loss, dict(zip(names, (*metrics.values(), *by_dataset), strict=True))
