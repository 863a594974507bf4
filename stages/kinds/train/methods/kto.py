"""Kahneman-Tversky optimization (KTO): single answers labelled good or bad, relative to a reference model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from stages.core.fields import PositiveFp32, StrictModel
from stages.kinds.train.methods.method import Method
from stages.kinds.train.methods.pairs import METRICS

if TYPE_CHECKING:
    from torch import Tensor

    from stages.data.batch import Signal
    from stages.engines.loss import Counts, Parts, Totals

OWN_METRICS = {
    **{name: METRICS[name] for name in ("reward_chosen", "reward_rejected", "reward_margin")},
    "kl": "estimated divergence from the reference model, in nats",
}


class KtoConfig(StrictModel):
    """Options of Kahneman-Tversky optimization (Ethayarajh et al. 2024), named as in TRL."""

    beta: PositiveFp32 = Field(0.1, description="Strength of the pull towards the reference model.")
    loss_type: Literal["kto", "apo_zero_unpaired"] = Field(
        "kto",
        description="Loss. kto: KTO itself; apo_zero_unpaired: APO-zero of single answers, without the divergence.",
    )
    desirable_weight: PositiveFp32 = Field(
        1.0, description="Weight of good answers in the loss, to balance unequal numbers of good and bad ones."
    )
    undesirable_weight: PositiveFp32 = Field(1.0, description="Weight of bad answers in the loss.")


@dataclass(frozen=True)
class KtoLoss:
    """KTO's loss: mean over answers of λ (1 - σ(±β (log π/π_ref - z))), + for good and - for bad ones.

    Ethayarajh et al. 2024, equation 8. z is the divergence, and 0 for apo_zero_unpaired.
    """

    config: KtoConfig
    metric_names: ClassVar[tuple[str, ...]] = tuple(OWN_METRICS)

    def counts(self, signal: Signal) -> Counts:
        assert signal.is_good is not None
        num_good = int(signal.is_good.sum())
        return {"documents": signal.documents.count, "good": num_good, "bad": signal.documents.count - num_good}

    def __call__(self, token_log_probabilities: Tensor, signal: Signal, totals: Totals) -> Parts:
        assert signal.is_good is not None
        assert signal.reference_log_probabilities is not None
        config, kl = self.config, signal.kl or 0.0
        ratios = signal.log_probabilities(token_log_probabilities) - signal.reference_log_probabilities
        signs, weights = (
            # `good` where the label is True, `bad` where it is False: [documents]
            signal.is_good * (good - bad) + bad
            for good, bad in ((1.0, -1.0), (config.desirable_weight, config.undesirable_weight))
        )
        losses = weights * (1 - (signs * config.beta * (ratios - kl)).sigmoid())
        rewards = config.beta * ratios.detach()
        chosen = (rewards * signal.is_good).sum() / totals["good"]
        rejected = (rewards * ~signal.is_good).sum() / totals["bad"]
        metrics = {
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "reward_margin": chosen - rejected,
            # one number for the global batch: weighted by documents, so that the micro-batches' parts add up to it
            "kl": rewards.new_tensor(kl * signal.documents.count) / totals["documents"],
        }
        return losses.sum() / totals["documents"], metrics


KTO = Method(
    name="kto",
    rows="labelled",
    build_loss=KtoLoss,
    options=KtoConfig,
    needs_reference=lambda _: True,
    needs_divergence=lambda config: config.loss_type == "kto",
    metrics=OWN_METRICS,
    averaged_over="documents",
    headline=("reward_margin",),
    usual_learning_rates=((1.5, 2e-6), (1e9, 5e-7)),
)
