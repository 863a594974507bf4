"""Odds ratio preference optimization (ORPO): SFT on the better answer, plus a loss that raises its odds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from stages.core.fields import PositiveFp32, StrictModel
from stages.kinds.train.methods.method import BatchChange, Method
from stages.kinds.train.methods.pairs import METRICS, NLL, chosen_nll, num_chosen_tokens, pair_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from stages.data.batch import Signal
    from stages.engines.loss import Counts, Parts, Totals

OWN_METRICS = {
    **METRICS,
    **NLL,
    "log_odds_chosen": "mean log of the odds of the preferred answer over those of the other one",
    "log_odds_ratio": "mean log σ of that, the term that β weighs",
}


class OrpoConfig(StrictModel):
    """Options of odds ratio preference optimization (Hong et al. 2024), named as in TRL."""

    beta: PositiveFp32 = Field(0.1, description="Weight of the odds-ratio term beside the likelihood; λ in the paper.")


@dataclass(frozen=True)
class OrpoLoss:
    """ORPO's loss -log π of the preferred texts - β log σ(log odds_chosen / odds_rejected).

    Hong et al. 2024, equations 6 and 7. As in TRL, the first term is a mean over all tokens of the preferred texts,
    prompts included; the probability P of odds P / (1 - P) is the geometric mean over an answer's tokens.
    """

    config: OrpoConfig
    metric_names: ClassVar[tuple[str, ...]] = tuple(OWN_METRICS)

    def counts(self, signal: Signal) -> Counts:
        return {"pairs": signal.documents.count // 2, "chosen tokens": num_chosen_tokens(signal)}

    def __call__(self, token_log_probabilities: Tensor, signal: Signal, totals: Totals) -> Parts:
        """Return the contributions to the mean ORPO loss and its metrics; rewards are β × mean log-probability."""
        from torch.nn.functional import logsigmoid

        assert signal.target_weights is not None, "prompts and answers are both targets"
        means = signal.log_probabilities(token_log_probabilities) / signal.documents.sums(signal.target_weights)
        chosen, rejected = means[0::2], means[1::2]
        log_odds = _log_odds(chosen) - _log_odds(rejected)
        ratio = logsigmoid(log_odds)
        nll = chosen_nll(token_log_probabilities, signal, totals)
        metrics = {
            **pair_metrics(self.config.beta * chosen, self.config.beta * rejected, totals),
            "nll_loss": nll.detach(),
            "log_odds_chosen": log_odds.detach().sum() / totals["pairs"],
            "log_odds_ratio": ratio.detach().sum() / totals["pairs"],
        }
        return nll - self.config.beta * ratio.sum() / totals["pairs"], metrics


def _log_odds(log_probability: Tensor) -> Tensor:
    """Return the log-odds log P / (1 - P) from log P; a P of 1 is taken as the largest below 1."""
    import torch

    certain = -torch.finfo(log_probability.dtype).eps
    kept = log_probability.clamp(max=certain)
    # log(1 - P) by expm1: near P = 1 the difference 1 - exp(log P) would lose all digits
    return kept - torch.log(-torch.expm1(kept))


def _with_prompts(_: OrpoConfig) -> BatchChange:
    from stages.kinds.train.methods.targets import ChosenPrompts

    return ChosenPrompts()


ORPO = Method(
    name="orpo",
    rows="pairs",
    build_loss=OrpoLoss,
    options=OrpoConfig,
    batch_change=_with_prompts,
    metrics=OWN_METRICS,
    averaged_over="pairs and preferred tokens",
    headline=("preference_accuracy",),
)
