"""Metrics and counts shared by the methods that learn from pairs of a chosen and a rejected answer.

Documents 2k are chosen, 2k + 1 rejected, in the same packed row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from stages.data.batch import Signal
    from stages.engines.loss import Totals

METRICS = {
    "reward_chosen": "mean reward of the preferred documents",
    "reward_rejected": "mean reward of the others",
    "reward_margin": "difference of the two",
    "preference_accuracy": "share of pairs in which the preferred document has the higher reward",
}
NLL = {"nll_loss": "mean negative log-likelihood of the preferred documents' tokens"}


def pair_metrics(chosen: Tensor, rejected: Tensor, totals: Totals) -> dict[str, Tensor]:
    """Return the contributions to mean rewards, margin and accuracy, from rewards of answer pairs, float32 [pairs]."""
    chosen, rejected = chosen.detach(), rejected.detach()
    sums = {
        "reward_chosen": chosen.sum(),
        "reward_rejected": rejected.sum(),
        "reward_margin": (chosen - rejected).sum(),
        "preference_accuracy": (chosen > rejected).float().sum(),
    }
    return {name: value / totals["pairs"] for name, value in sums.items()}


def num_chosen_tokens(signal: Signal) -> int:
    """Return the number of target tokens in a micro-batch's preferred documents."""
    return int(signal.documents.sums(signal.has_target.long())[0::2].sum())


def chosen_nll(token_log_probabilities: Tensor, signal: Signal, totals: Totals) -> Tensor:
    """Return the contribution to preferred answers' negative log-likelihood; needs the count `chosen tokens`."""
    return -signal.documents.sums(token_log_probabilities)[0::2].sum() / totals["chosen tokens"]
