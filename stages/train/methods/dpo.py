"""Direct preference optimization: of two answers the better becomes likelier, relative to a reference model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveFloat

from stages.core.strict import StrictModel
from stages.train.methods.method import Method

if TYPE_CHECKING:
    from torch import Tensor

    from stages.data.batch import Batch
    from stages.engines.loss import Sums

METRICS = {
    "reward_chosen": "mean reward of the preferred documents",
    "reward_rejected": "mean reward of the others",
    "reward_margin": "difference of the two",
    "preference_accuracy": "share of pairs in which the preferred document has the higher reward",
}


class DpoConfig(StrictModel):
    """Direct preference optimization (Rafailov et al. 2023; IPO: Azar et al. 2023; hinge: Zhao et al. 2023)."""

    beta: PositiveFloat = Field(0.1, description="Strength of the pull towards the reference model.")
    loss_type: Literal["sigmoid", "ipo", "hinge"] = Field("sigmoid", description="sigmoid: DPO; ipo: IPO; hinge: SLiC.")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="Share of pairs assumed to be the wrong way round.")


@dataclass(frozen=True)
class DpoLoss:
    """Sums over pairs; documents 2k are chosen, 2k + 1 rejected.

    With h = (log π/π_ref of the chosen) - (log π/π_ref of the rejected):

        sigmoid  -(1 - ε) log σ(β h) - ε log σ(-β h)      Rafailov et al. 2023, equation 7; ε is `label_smoothing`
        ipo      (h - 1 / 2β)²                            Azar et al. 2023, equation 17, h from means over tokens, as
                                                          its authors and TRL do, so that long answers weigh no more
        hinge    max(0, 1 - β h)                          Zhao et al. 2023
    """

    config: DpoConfig
    metric_names: ClassVar[tuple[str, ...]] = tuple(METRICS)

    def count(self, batch: Batch) -> int:
        """Pairs."""
        return batch.num_documents // 2

    def __call__(self, token_log_probabilities: Tensor, batch: Batch) -> Sums:
        """Loss and metrics of all pairs; rewards are β log π/π_ref."""
        assert batch.reference_log_probabilities is not None
        log_ratios = batch.document_sums(token_log_probabilities) - batch.reference_log_probabilities
        rewards = self.config.beta * log_ratios.detach()
        margins = rewards[0::2] - rewards[1::2]
        if self.config.loss_type == "ipo":
            log_ratios = log_ratios / batch.document_sums(batch.has_target.float())
        metrics = {
            "reward_chosen": rewards[0::2].sum(),
            "reward_rejected": rewards[1::2].sum(),
            "reward_margin": margins.sum(),
            "preference_accuracy": (margins > 0).float().sum(),
        }
        return self._pair_losses(log_ratios[0::2] - log_ratios[1::2]).sum(), metrics

    def _pair_losses(self, margins: Tensor) -> Tensor:
        from torch.nn.functional import logsigmoid

        beta, smoothing = self.config.beta, self.config.label_smoothing
        if self.config.loss_type == "ipo":
            return (margins - 1 / (2 * beta)) ** 2
        if self.config.loss_type == "hinge":
            return (1 - beta * margins).relu()
        return -(1 - smoothing) * logsigmoid(beta * margins) - smoothing * logsigmoid(-beta * margins)


DPO = Method(
    name="dpo",
    rows="pairs",
    build_loss=DpoLoss,
    options=DpoConfig,
    needs_reference=True,
    metrics=METRICS,
    averaged_over="pairs",
    headline=("preference_accuracy",),
    is_null_in_identity=True,  # in stores that exist, the identity of an SFT stage holds `dpo: null`
)
