"""Supervised fine-tuning (SFT): cross-entropy of the target tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stages.kinds.train.methods.method import Method

if TYPE_CHECKING:
    from torch import Tensor

    from stages.data.batch import Signal
    from stages.engines.loss import Counts, Parts, Totals


@dataclass(frozen=True)
class SftLoss:
    """Loss of supervised fine-tuning: mean cross-entropy of the target tokens, in nats."""

    metric_names: ClassVar[tuple[str, ...]] = ()

    def counts(self, signal: Signal) -> Counts:
        return {"targets": int(signal.has_target.sum())}

    def __call__(self, token_log_probabilities: Tensor, signal: Signal, totals: Totals) -> Parts:
        return -token_log_probabilities.sum() / totals["targets"], {}


SFT = Method(
    name="sft",
    rows="examples",
    build_loss=lambda _: SftLoss(),
    is_likelihood=True,
    teaches_tokens=True,
    usual_learning_rates=((0.01, 3e-3), (1.5, 5e-5), (5, 2e-5), (1e9, 1e-5)),
)
