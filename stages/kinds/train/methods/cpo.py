"""Contrastive preference optimization (CPO): DPO without a reference model, plus SFT on the better answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from stages.core.fields import HELD_IN_FP32, NonNegativeFp32, PositiveFp32, StrictModel
from stages.kinds.train.methods.method import Method
from stages.kinds.train.methods.pairs import METRICS, NLL, chosen_nll, num_chosen_tokens, pair_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from stages.data.batch import Signal
    from stages.engines.loss import Counts, Parts, Totals

CpoLossType = Literal["sigmoid", "hinge", "ipo", "simpo", "alphapo"]
OF_MEANS: tuple[CpoLossType, ...] = ("ipo", "simpo", "alphapo")
"""CPO losses that use the mean over an answer's tokens instead of the sum."""
WITH_MARGIN: tuple[CpoLossType, ...] = ("simpo", "alphapo")
SMOOTHED: tuple[CpoLossType, ...] = ("sigmoid", "simpo", "alphapo")


class CpoConfig(StrictModel):
    """Options of contrastive preference optimization (Xu et al. 2024) and its variants, named as in TRL."""

    beta: PositiveFp32 = Field(
        0.1, description="Scale β of the implicit rewards, which are log-probabilities of answers."
    )
    loss_type: CpoLossType = Field(
        "sigmoid",
        description="Loss on the difference of a pair's rewards. sigmoid: CPO; hinge: SLiC; simpo: CPO-SimPO; "
        "alphapo: simpo with `cpo_alpha` 0.",
    )
    cpo_alpha: NonNegativeFp32 = Field(
        1.0, description="Weight of the preferred answers' negative log-likelihood in the loss."
    )
    label_smoothing: NonNegativeFp32 = Field(
        0.0, lt=0.5, description=f"Share of pairs assumed to be the wrong way round ({', '.join(SMOOTHED)})."
    )
    simpo_gamma: NonNegativeFp32 = Field(
        0.5,
        description="Margin by which the preferred answer's reward should exceed the rejected one's (simpo, alphapo).",
    )
    alpha: Annotated[float, Field(allow_inf_nan=False), HELD_IN_FP32] = Field(
        0.0, description="Parameter α of AlphaPO's reward, (1 - p^-α) / α for an answer of probability p; 0: log p."
    )

    @property
    def nll_weight(self) -> float:
        """Weight of the preferred answers' negative log-likelihood in the loss; 0 for alphapo."""
        return 0.0 if self.loss_type == "alphapo" else self.cpo_alpha

    @model_validator(mode="after")
    def _options_of_the_loss_only(self) -> Self:
        if self.label_smoothing and self.loss_type not in SMOOTHED:
            raise ValueError(
                f"`label_smoothing` does nothing to {self.loss_type}, only to {', '.join(SMOOTHED)}; remove it"
            )
        if self.simpo_gamma != 0.5 and self.loss_type not in WITH_MARGIN:
            raise ValueError(f"`simpo_gamma` does nothing to {self.loss_type}, only to simpo and alphapo; remove it")
        if "cpo_alpha" in self.model_fields_set and self.loss_type == "alphapo" and self.cpo_alpha:
            raise ValueError(
                f"`cpo_alpha` is {self.cpo_alpha}, and alphapo has none: expected 0, or `loss_type: simpo`"
            )
        return self


@dataclass(frozen=True)
class CpoLoss:
    """CPO's loss: mean over pairs of -log σ(β (r_chosen - r_rejected)), or a variant: Xu et al. 2024, equation 3.

    Plus `cpo_alpha` × mean over preferred tokens of -log π. r is log π, or AlphaPO's (Gupta et al. 2025).
    """

    config: CpoConfig
    metric_names: ClassVar[tuple[str, ...]] = (*METRICS, *NLL)

    def counts(self, signal: Signal) -> Counts:
        return {"pairs": signal.documents.count // 2, "chosen tokens": num_chosen_tokens(signal)}

    def __call__(self, token_log_probabilities: Tensor, signal: Signal, totals: Totals) -> Parts:
        """Return a micro-batch's contributions to the mean loss and its metrics; rewards are β log π or AlphaPO's."""
        rewards = self._rewards(token_log_probabilities, signal)
        chosen, rejected = rewards[0::2], rewards[1::2]
        nll = chosen_nll(token_log_probabilities, signal, totals)
        loss = self._losses(chosen - rejected).sum() / totals["pairs"] + self.config.nll_weight * nll
        return loss, {**pair_metrics(chosen, rejected, totals), "nll_loss": nll.detach()}

    def _rewards(self, token_log_probabilities: Tensor, signal: Signal) -> Tensor:
        """Return each answer's reward, β log π or AlphaPO's function of it, float32 [documents]."""
        values, alpha = signal.log_probabilities(token_log_probabilities), self.config.alpha
        if self.config.loss_type in OF_MEANS:
            # [documents]: mean log-probability of a token, so that longer answers have no lower reward
            values = values / signal.documents.sums(signal.has_target.float())
        return self.config.beta * ((1 - (-alpha * values).exp()) / alpha if alpha else values)

    def _losses(self, margins: Tensor) -> Tensor:
        """Return CPO's loss of each pair. margins: its chosen answer's reward minus the rejected one's."""
        from torch.nn.functional import logsigmoid

        config = self.config
        if config.loss_type == "hinge":
            return (1 - margins).relu()
        if config.loss_type == "ipo":
            # The rewards hold β, and IPO is of plain log-probabilities.
            return (margins / config.beta - 1 / (2 * config.beta)) ** 2
        logits = margins - config.simpo_gamma if config.loss_type in WITH_MARGIN else margins
        return -(1 - config.label_smoothing) * logsigmoid(logits) - config.label_smoothing * logsigmoid(-logits)


CPO = Method(
    name="cpo",
    rows="pairs",
    build_loss=CpoLoss,
    options=CpoConfig,
    metrics={**METRICS, **NLL},
    averaged_over="pairs and preferred tokens",
    headline=("preference_accuracy",),
)
