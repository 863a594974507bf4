"""The loss that balances experts (Fedus et al. 2022, Switch Transformers, equations 4 to 6), of each row of a batch.

Of a layer with E experts and a row it is E × the sum over experts of f × P: f is how often a token of the row chooses
the expert, P the mean probability that the router gives it. That is what Transformers' `load_balancing_loss_func` gives
to one row in one layer. The loss of a step is the mean over all tokens and mixture layers: taken of micro-batches, as
Transformers and Megatron do, or of a whole step, whose choices are not known when its first micro-batch goes backward,
it would differ by layout. DeepSeek-V3 (2024, section 2.1.2) takes it of sequences, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stages.data.batch import Batch

METRIC = "aux_loss"
"""The loss, before it is multiplied by its coefficient."""


def num_tokens(micro_batches: Sequence[Batch], add_up: Callable[[Tensor], Tensor]) -> float:
    """Of a global batch, of which these are a share, without padding; `add_up` adds float64 over the shares."""
    own = sum(int((batch.token_rows >= 0).sum()) for batch in micro_batches)
    return add_up(torch.tensor(own, dtype=torch.float64)).item()


def row_balance(
    probabilities: Tensor,
    is_chosen: Tensor,
    rows: Tensor,
    num_rows: int,
    add_up: Callable[[Tensor], Tensor] = lambda counts: counts,
) -> Tensor:
    """Of one layer, the sum over these tokens of the loss of their row, differentiable by probabilities; a scalar.

    probabilities, is_chosen: float32 and bool [tokens, experts]. rows: int64 [tokens], negative in padding. add_up:
    counts of a row over the processes that have a part of its tokens; the results of these processes add up.
    """
    num_experts = probabilities.shape[1]
    is_real = rows >= 0
    counted = torch.cat([is_chosen, is_real[:, None]], 1) * is_real[:, None]
    row = rows.clamp(min=0)
    zeros = probabilities.new_zeros(num_rows, num_experts + 1)
    counts = add_up(zeros.index_add(0, row, counted.float()))
    choices, num_tokens = counts[:, :-1], counts[:, -1]
    summed = zeros[:, :-1].index_add(0, row, probabilities * is_real[:, None])
    return num_experts * ((choices * summed).sum(1) / num_tokens.clamp(min=1)).sum()


def balance_of_logits(logits: Tensor, rows: Tensor, experts_per_token: int) -> Tensor:
    """`row_balance` of what a router gives: [rows, sequence, experts]; `rows` int64 [rows, sequence]."""
    probabilities = logits.flatten(0, 1).float().softmax(1)
    chosen = probabilities.topk(experts_per_token).indices
    is_chosen = torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, chosen, True)
    return row_balance(probabilities, is_chosen, rows.flatten(), len(rows))
