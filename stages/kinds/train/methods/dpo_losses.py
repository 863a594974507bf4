"""Losses that `dpo.loss_type` names: functions from the log-probabilities of answer pairs to one loss per pair.

In all of them β is `dpo.beta`, ε `dpo.label_smoothing`, c and r are log π/π_ref of the chosen and of the rejected
answer, h = c - r, and σ is the logistic function.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class Pairs:
    """Log-probabilities of chosen and rejected answers, by model and reference: sums in nats, float32 [pairs]."""

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_tokens: Tensor
    """Number of target tokens in each chosen answer; `rejected_tokens` likewise."""
    rejected_tokens: Tensor
    rows: Tensor
    """Number of the packed row that holds each pair, int64 [pairs]."""

    @property
    def c(self) -> Tensor:
        """Log-ratio log π/π_ref of the chosen answers, float32 [pairs]."""
        return self.chosen - self.reference_chosen

    @property
    def r(self) -> Tensor:
        """Log-ratio log π/π_ref of the rejected answers, float32 [pairs]."""
        return self.rejected - self.reference_rejected

    @property
    def h(self) -> Tensor:
        """Log-ratio of chosen minus rejected answers: how much more than the reference the model prefers the chosen."""
        return self.c - self.r

    @property
    def h_per_token(self) -> Tensor:
        """Difference of log-ratios averaged over tokens, so that long answers weigh no more than short ones."""
        return self.c / self.chosen_tokens - self.r / self.rejected_tokens


@dataclass(frozen=True)
class Options:
    """Options in the recipe's `dpo` block that the loss functions read."""

    beta: float
    label_smoothing: float
    discopop_tau: float


PairLoss = Callable[[Pairs, Options], Tensor]


def sigmoid(pairs: Pairs, options: Options) -> Tensor:
    """Sigmoid loss of DPO: -(1 - ε) log σ(β h) - ε log σ(-β h). Rafailov et al. 2023, equation 7; ε: Mitchell 2023."""
    return _smoothed(options.beta * pairs.h, options.label_smoothing)


def sigmoid_norm(pairs: Pairs, options: Options) -> Tensor:
    """Sigmoid DPO loss of log-ratios averaged over tokens: Lambert et al. 2024 (Tülu 3), equation 6."""
    return _smoothed(options.beta * pairs.h_per_token, options.label_smoothing)


def ipo(pairs: Pairs, options: Options) -> Tensor:
    """IPO's loss (h - 1 / 2β)², h averaged over tokens as its authors and TRL do. Azar et al. 2023, equation 17."""
    # A square around 1 / 2β instead of log σ: it does not push h towards infinity where all annotators agree.
    return (pairs.h_per_token - 1 / (2 * options.beta)) ** 2


def hinge(pairs: Pairs, options: Options) -> Tensor:
    """Hinge loss max(0, 1 - β h) of the log-ratio difference h. Zhao et al. 2023 (SLiC)."""
    return (1 - options.beta * pairs.h).relu()


def robust(pairs: Pairs, options: Options) -> Tensor:
    """Robust DPO's loss (-(1 - ε) log σ(β h) + ε log σ(-β h)) / (1 - 2ε). Chowdhury et al. 2024."""
    # Over labels that are flipped with probability ε, this has the mean of the loss on the true labels; it may be < 0.
    right, wrong = -logsigmoid(options.beta * pairs.h), -logsigmoid(-options.beta * pairs.h)
    return ((1 - options.label_smoothing) * right - options.label_smoothing * wrong) / (1 - 2 * options.label_smoothing)


def exo_pair(pairs: Pairs, options: Options) -> Tensor:
    """EXO's loss KL((σ(β h), σ(-β h)) ‖ (1 - ε, ε)) of log-ratio difference h. Ji et al. 2024, equation 16."""
    # logs of the model's distribution over the two answers; the labels' is (1 - ε, ε), and log1p(-ε) is log(1 - ε)
    wins, loses = logsigmoid(options.beta * pairs.h), logsigmoid(-options.beta * pairs.h)
    return wins.exp() * (wins - math.log1p(-options.label_smoothing)) + loses.exp() * (
        loses - math.log(options.label_smoothing)
    )


def nca_pair(pairs: Pairs, options: Options) -> Tensor:
    """NCA's loss -log σ(β c) - ½ log σ(-β c) - ½ log σ(-β r) of the log-ratios c and r. Chen et al. 2024."""
    c, r = options.beta * pairs.c, options.beta * pairs.r
    return -logsigmoid(c) - 0.5 * logsigmoid(-c) - 0.5 * logsigmoid(-r)


def bco_pair(pairs: Pairs, options: Options) -> Tensor:
    """BCO's loss -log σ(β c) - log σ(-β r), without its moving threshold, as TRL has it. Jung et al. 2024."""
    return -logsigmoid(options.beta * pairs.c) - logsigmoid(-options.beta * pairs.r)


def sppo_hard(pairs: Pairs, options: Options) -> Tensor:
    """SPPO's loss (c - 1 / 2β)² + (r + 1 / 2β)²; the chosen answer always wins. Wu et al. 2024, equation 4.7."""
    return (pairs.c - 0.5 / options.beta) ** 2 + (pairs.r + 0.5 / options.beta) ** 2


def apo_zero(pairs: Pairs, options: Options) -> Tensor:
    """APO-zero's loss of the log-ratios c (chosen) and r (rejected): 1 - σ(β c) + σ(β r).

    It is for chosen answers that are better than the model's. D'Oosterlinck et al. 2024, equation 7.
    """
    return 1 - (options.beta * pairs.c).sigmoid() + (options.beta * pairs.r).sigmoid()


def apo_down(pairs: Pairs, options: Options) -> Tensor:
    """APO-down's loss of the chosen log-ratio c and the log-ratio difference h: σ(β c) + 1 - σ(β h).

    It is for chosen answers that are worse than the model's. D'Oosterlinck et al. 2024, equation 8.
    """
    return (options.beta * pairs.c).sigmoid() + 1 - (options.beta * pairs.h).sigmoid()


def discopop(pairs: Pairs, options: Options) -> Tensor:
    """DiscoPOP's loss: a mean of -log σ(β h) and exp(-β h), modulated by `discopop_tau`. Lu et al. 2024, equation 5."""
    logits = options.beta * pairs.h
    # share of the exponential loss: towards 1 where the model already prefers the chosen answer clearly
    share = (logits / options.discopop_tau).sigmoid()
    return -logsigmoid(logits) * (1 - share) + (-logits).exp() * share


def aot(pairs: Pairs, options: Options) -> Tensor:
    """AOT loss (Melnyk et al. 2024): sigmoid loss of the model's sorted preferences minus the reference's.

    It compares distributions: those of the pairs in one packed row, the same under every layout.
    """
    # The model's k-th smallest preference meets the reference's k-th smallest, which may be of another pair.
    model = _sorted_in_rows(pairs.chosen - pairs.rejected, pairs.rows)
    reference = _sorted_in_rows(pairs.reference_chosen - pairs.reference_rejected, pairs.rows)
    return _smoothed(options.beta * (model - reference), options.label_smoothing)


def aot_unpaired(pairs: Pairs, options: Options) -> Tensor:
    """AOT loss of unpaired answers: sigmoid loss of sorted log-ratios, of chosen minus those of rejected answers."""
    return _smoothed(
        options.beta * (_sorted_in_rows(pairs.c, pairs.rows) - _sorted_in_rows(pairs.r, pairs.rows)),
        options.label_smoothing,
    )


PAIR_LOSSES: dict[str, PairLoss] = {
    loss.__name__: loss
    for loss in (
        sigmoid,
        sigmoid_norm,
        ipo,
        hinge,
        robust,
        exo_pair,
        nca_pair,
        bco_pair,
        sppo_hard,
        apo_zero,
        apo_down,
        discopop,
        aot,
        aot_unpaired,
    )
}


def _smoothed(logits: Tensor, smoothing: float) -> Tensor:

    return -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)


def _sorted_in_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Sort values [pairs] in ascending order within each packed row. rows: row number of each pair, ascending."""
    # `values[:0]` is for a micro-batch of padding alone: `cat` takes no empty list, and the result keeps its graph.
    return torch.cat([values[:0], *(values[rows == row].sort().values for row in rows.unique())])
