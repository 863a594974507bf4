"""Direct preference optimization (DPO): of two answers the better becomes likelier, relative to a reference model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from stages.core.fields import AddedLater, NonNegativeFp32, PositiveFp32, StrictModel
from stages.kinds.train.methods.method import BatchChange, Method
from stages.kinds.train.methods.pairs import METRICS, chosen_nll, num_chosen_tokens, pair_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from stages.data.batch import Signal
    from stages.engines.loss import Counts, Parts, Totals
    from stages.kinds.train.methods.dpo_losses import Pairs

LossType = Literal[
    "sigmoid",
    "sigmoid_norm",
    "ipo",
    "hinge",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "aot",
    "aot_unpaired",
    "sft",
]
SMOOTHED: tuple[LossType, ...] = ("sigmoid", "sigmoid_norm", "robust", "exo_pair", "aot", "aot_unpaired")
"""Losses on which `label_smoothing` has an effect."""


class DpoConfig(StrictModel):
    """Options of direct preference optimization and its variants, named as in TRL; formulas: `dpo_losses.py`."""

    beta: PositiveFp32 = Field(0.1, description="Strength of the pull towards the reference model.")
    loss_type: LossType | tuple[LossType, ...] = Field(
        "sigmoid",
        description="Loss, or a list of losses whose weighted sum is minimised. sigmoid: DPO; hinge: SLiC; sft: "
        "negative log-likelihood of the preferred answers.",
    )
    loss_weights: Annotated[tuple[PositiveFp32, ...] | None, AddedLater()] = Field(
        None, description="Weights of the loss types, in their order; default: 1 each."
    )
    label_smoothing: NonNegativeFp32 = Field(
        0.0, lt=0.5, description=f"Share of pairs assumed to be the wrong way round ({', '.join(SMOOTHED)})."
    )
    discopop_tau: Annotated[PositiveFp32, AddedLater()] = Field(0.05, description="Temperature τ of the loss discopop.")
    rpo_alpha: Annotated[PositiveFp32 | None, AddedLater()] = Field(
        None,
        description="Weight of the `sft` loss added to the others (RPO), the same as listing `sft` with this weight.",
    )
    ld_alpha: Annotated[NonNegativeFp32 | None, AddedLater()] = Field(
        None,
        le=1,
        description="Weight of an answer's tokens beyond the length of the other answer in its pair (LD-DPO); "
        "default: 1.",
    )
    reference: Annotated[Literal["start", "none"], AddedLater()] = Field(
        "start",
        description="Reference model of the rewards: the start model, or none (all answers equally likely).",
    )

    @property
    def loss_types(self) -> tuple[LossType, ...]:
        return (self.loss_type,) if isinstance(self.loss_type, str) else self.loss_type

    @property
    def weights(self) -> dict[str, float]:
        weights: dict[str, float] = dict(
            zip(self.loss_types, self.loss_weights or [1.0] * len(self.loss_types), strict=True)
        )
        return {**weights, "sft": self.rpo_alpha} if self.rpo_alpha else weights

    @model_validator(mode="after")
    def _options_of_the_losses_only(self) -> Self:
        names = self.loss_types
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"`loss_type` is {list(names)}; expected different losses, at least one")
        if self.loss_weights and len(self.loss_weights) != len(names):
            raise ValueError(f"`loss_weights` has {len(self.loss_weights)} numbers for {len(names)} losses")
        if self.label_smoothing and not set(names) & set(SMOOTHED):
            raise ValueError(
                f"`label_smoothing` does nothing to {', '.join(names)}, only to {', '.join(SMOOTHED)}; remove it"
            )
        if "exo_pair" in names and not self.label_smoothing:
            raise ValueError("`loss_type: exo_pair` needs `label_smoothing` above 0; its authors use 1.0e-3")
        if self.rpo_alpha and "sft" in names:
            raise ValueError("`rpo_alpha` is the weight of `sft`, which `loss_type` names, too; say it in one place")
        if self.discopop_tau != 0.05 and "discopop" not in names:
            raise ValueError(f"`discopop_tau` does nothing to {', '.join(names)}; remove it")
        return self


@dataclass(frozen=True)
class DpoLoss:
    """DPO's loss: weighted sum of means over pairs; `sft` is a mean over the preferred answers' target tokens."""

    config: DpoConfig
    metric_names: ClassVar[tuple[str, ...]] = tuple(METRICS)

    def counts(self, signal: Signal) -> Counts:
        return {"pairs": signal.documents.count // 2, "chosen tokens": num_chosen_tokens(signal)}

    def __call__(self, token_log_probabilities: Tensor, signal: Signal, totals: Totals) -> Parts:
        from stages.kinds.train.methods.dpo_losses import PAIR_LOSSES, Options  # torch: a recipe is read without it

        pairs = self._pairs(token_log_probabilities, signal)
        options = Options(self.config.beta, self.config.label_smoothing, self.config.discopop_tau)
        losses = [
            weight * chosen_nll(token_log_probabilities, signal, totals)
            if name == "sft"
            else weight * PAIR_LOSSES[name](pairs, options).sum() / totals["pairs"]
            for name, weight in self.config.weights.items()
        ]
        return sum(losses[1:], losses[0]), pair_metrics(self.config.beta * pairs.c, self.config.beta * pairs.r, totals)

    def _pairs(self, token_log_probabilities: Tensor, signal: Signal) -> Pairs:
        from stages.kinds.train.methods.dpo_losses import Pairs

        sums, reference = signal.log_probabilities(token_log_probabilities), signal.reference_log_probabilities
        if reference is None:
            # log π_ref = 0: the log-ratios c and r are then log π itself
            reference = sums.new_zeros(sums.shape)
        tokens = signal.documents.sums(signal.has_target.float())
        return Pairs(
            # documents 2k are chosen, 2k + 1 rejected, always in the same row
            chosen=sums[0::2],
            rejected=sums[1::2],
            reference_chosen=reference[0::2],
            reference_rejected=reference[1::2],
            chosen_tokens=tokens[0::2],
            rejected_tokens=tokens[1::2],
            rows=signal.documents.rows[0::2],
        )


def _tail_weights(config: DpoConfig) -> BatchChange | None:
    if config.ld_alpha is None:
        return None
    from stages.kinds.train.methods.targets import TailWeights

    return TailWeights(config.ld_alpha)


DPO = Method(
    name="dpo",
    rows="pairs",
    build_loss=DpoLoss,
    options=DpoConfig,
    needs_reference=lambda config: config.reference == "start",
    batch_change=_tail_weights,
    metrics=METRICS,
    averaged_over="pairs",
    headline=("preference_accuracy",),
    is_null_in_identity=True,  # in stores that exist, the identity of an SFT stage holds `dpo: null`
    usual_learning_rates=((1.5, 2e-6), (1e9, 5e-7)),
)
