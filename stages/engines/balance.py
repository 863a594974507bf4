"""Load-balancing loss of experts (Fedus et al. 2022, Switch Transformers, equations 4 to 6), for each packed row.

For a layer with E experts and a row it is E × the sum over experts of f × P: f is how often a token of the row chooses
the expert, P the mean probability that the router gives it, as in Transformers' `load_balancing_loss_func` for one row
in one layer. The loss of a step is the mean over all tokens and mixture layers. Over micro-batches, as in Transformers
and Megatron, it would differ by layout; over a step, the choices are not known when its first micro-batch goes
backward. DeepSeek-V3 (2024, section 2.1.2) computes it over sequences, too.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stages.data.batch import Batch

METRIC = "aux_loss"
"""Name of the metric for the load-balancing loss, before multiplication by its coefficient."""


def num_tokens(micro_batches: Sequence[Batch], add_up: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a global batch's tokens without padding. add_up: sums float64 values over data-parallel shares."""
    own = sum(int((batch.documents.token_rows >= 0).sum()) for batch in micro_batches)
    return add_up(torch.tensor(own, dtype=torch.float64))


def row_balance(
    probabilities: Tensor,
    is_chosen: Tensor,
    rows: Tensor,
    num_rows: int,
    add_up: Callable[[Tensor], Tensor] = lambda counts: counts,
) -> Tensor:
    """Return the load-balancing loss of one layer, summed over packed rows; differentiable by `probabilities`.

    probabilities: float32 [tokens, experts]. is_chosen: bool [tokens, experts]. rows: int64 [tokens], negative in
    padding. add_up: sums a row's counts over the processes that hold parts of its tokens; their results add up.
    """
    num_experts = probabilities.shape[1]
    is_real = rows >= 0
    # [tokens, experts + 1]: choices, and a last column of ones that counts the tokens; 0 in padding
    counted = torch.cat([is_chosen, is_real[:, None]], 1) * is_real[:, None]
    row = rows.clamp(min=0)  # padding adds zeros to row 0
    zeros = probabilities.new_zeros(num_rows, num_experts + 1)
    # [rows, experts + 1]; no gradient runs through counts, so their sum over processes needs none
    counts = add_up(zeros.index_add(0, row, counted.float()))
    choices, num_tokens = counts[:, :-1], counts[:, -1]
    # [rows, experts]: this process's part of each row's sum of probabilities
    summed = zeros[:, :-1].index_add(0, row, probabilities * is_real[:, None])
    # f × P × tokens = choices × Σ probabilities ÷ tokens; a row of nothing but padding gives 0 ÷ 1.
    return num_experts * ((choices * summed).sum(1) / num_tokens.clamp(min=1)).sum()


def balance_of_logits(
    logits: Tensor,
    rows: Tensor,
    experts_per_token: int,
    num_rows: int,
    add_up: Callable[[Tensor], Tensor] = lambda counts: counts,
) -> Tensor:
    """Return a layer's load-balancing loss, summed over rows, of logits [rows, sequence, experts].

    rows: row of each token, int64 [rows, sequence], negative in padding. add_up: as in `row_balance`.
    """
    probabilities = logits.flatten(0, 1).float().softmax(1)  # [tokens, experts]
    chosen = probabilities.topk(experts_per_token).indices
    is_chosen = torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, chosen, True)
    return row_balance(probabilities, is_chosen, rows.flatten(), num_rows, add_up)
