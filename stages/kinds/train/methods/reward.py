"""Reward modelling: training of a model that gives one number per answer, higher for the better one of a pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from stages.core.fields import PositiveFp32, StrictModel
from stages.kinds.train.methods.method import Method
from stages.kinds.train.methods.pairs import METRICS, pair_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from stages.data.batch import Signal
    from stages.engines.loss import Counts, Parts, Totals


class RewardConfig(StrictModel):
    """Options of reward modelling (Bradley-Terry), named as in TRL; rows may have a `margin` between the rewards."""

    center_rewards_coefficient: PositiveFp32 | None = Field(
        None,
        description="Weight of the term that pulls the rewards' mean to 0 (centering; advised: 0.01). Default: none.",
    )


@dataclass(frozen=True)
class RewardLoss:
    """Loss of a reward model: mean over pairs of -log σ(r_chosen - r_rejected - margin), plus a centering term.

    Ouyang et al. 2022, equation 1; margins: Touvron et al. 2023, equation 2; centering, (r_chosen + r_rejected)² times
    `center_rewards_coefficient`: Eisenstein et al. 2023, equation 2.
    """

    config: RewardConfig
    metric_names: ClassVar[tuple[str, ...]] = tuple(METRICS)

    def counts(self, signal: Signal) -> Counts:
        return {"pairs": signal.documents.count // 2}

    def __call__(self, token_log_probabilities: Tensor, signal: Signal, totals: Totals) -> Parts:
        """Return contributions to the mean loss and metrics, from scores: each document's at one token, 0 elsewhere."""
        from torch.nn.functional import logsigmoid

        rewards = signal.documents.sums(token_log_probabilities)
        chosen, rejected = rewards[0::2], rewards[1::2]
        losses = -logsigmoid(chosen - rejected - (0.0 if signal.margins is None else signal.margins))
        if self.config.center_rewards_coefficient:
            losses = losses + self.config.center_rewards_coefficient * (chosen + rejected) ** 2
        return losses.sum() / totals["pairs"], pair_metrics(chosen, rejected, totals)


REWARD = Method(
    name="reward",
    rows="pairs",
    build_loss=RewardLoss,
    options=RewardConfig,
    needs_score_head=True,
    reads_margins=True,
    metrics=METRICS,
    averaged_over="pairs",
    headline=("preference_accuracy",),
)
