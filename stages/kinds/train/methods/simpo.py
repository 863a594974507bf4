"""Simple preference optimization (SimPO): DPO without a reference, by the mean log-probability of answers' tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from stages.core.fields import NonNegativeFp32, PositiveFp32, StrictModel
from stages.kinds.train.methods.method import Method
from stages.kinds.train.methods.pairs import METRICS, pair_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from stages.data.batch import Signal
    from stages.engines.loss import Counts, Parts, Totals


class SimpoConfig(StrictModel):
    """Options of simple preference optimization (Meng et al. 2024); defaults are its authors', as in ms-swift."""

    beta: PositiveFp32 = Field(2.0, description="Scale β of the rewards; TRL's default is that of DPO, 0.1.")
    gamma: NonNegativeFp32 = Field(
        1.0,
        description="Margin γ by which the preferred answer's reward should exceed the other's; TRL has 0.5.",
    )


@dataclass(frozen=True)
class SimpoLoss:
    """SimPO's loss: mean over pairs of -log σ(β (p_chosen - p_rejected) - γ), p the mean log-probability of a token.

    Meng et al. 2024, equation 6.
    """

    config: SimpoConfig
    metric_names: ClassVar[tuple[str, ...]] = tuple(METRICS)

    def counts(self, signal: Signal) -> Counts:
        return {"pairs": signal.documents.count // 2}

    def __call__(self, token_log_probabilities: Tensor, signal: Signal, totals: Totals) -> Parts:
        """Return the contributions to the mean SimPO loss and its metrics; rewards are β × mean log-probability."""
        from torch.nn.functional import logsigmoid

        tokens = signal.documents.sums(signal.has_target.float())
        rewards = self.config.beta * signal.documents.sums(token_log_probabilities) / tokens
        chosen, rejected = rewards[0::2], rewards[1::2]
        losses = -logsigmoid(chosen - rejected - self.config.gamma)
        return losses.sum() / totals["pairs"], pair_metrics(chosen, rejected, totals)


SIMPO = Method(
    name="simpo",
    rows="pairs",
    build_loss=SimpoLoss,
    options=SimpoConfig,
    metrics=METRICS,
    averaged_over="pairs",
    headline=("preference_accuracy",),
)
