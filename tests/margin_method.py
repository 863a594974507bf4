"""SimPO (Meng et al. 2024) registered by tests only, which proves that a method needs one module and an entry.

Import this before the config of the train stage: its fields are those of the methods that are registered by then.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import logsigmoid

from stages.core.fields import StrictModel
from stages.data.batch import Signal
from stages.engines.loss import Counts, Parts, Totals
from stages.kinds.train.methods.method import Method
from stages.kinds.train.methods.registry import METHODS


class MarginConfig(StrictModel):
    beta: float = 2.0
    target: float = 0.5


@dataclass(frozen=True)
class MarginLoss:
    """SimPO loss without reference model: -log σ(β (mean log π chosen - mean log π rejected) - target), equation 6."""

    config: MarginConfig
    metric_names: ClassVar[tuple[str, ...]] = ("answer_margin",)

    def counts(self, signal: Signal) -> Counts:
        return {"pairs": signal.documents.count // 2}

    def __call__(self, token_log_probabilities: Tensor, signal: Signal, totals: Totals) -> Parts:
        means = signal.documents.sums(token_log_probabilities) / signal.documents.sums(signal.has_target.float())
        margins = means[0::2] - means[1::2]
        losses = -logsigmoid(self.config.beta * margins - self.config.target)
        return losses.sum() / totals["pairs"], {"answer_margin": margins.detach().sum() / totals["pairs"]}


METHODS["margin"] = Method(
    name="margin",
    rows="pairs",
    build_loss=MarginLoss,
    options=MarginConfig,
    metrics={"answer_margin": "by how much likelier a token of the preferred answer is, in nats"},
    averaged_over="pairs",
    headline=("answer_margin",),
)
