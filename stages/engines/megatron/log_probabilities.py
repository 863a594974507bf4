"""Log-probabilities and likeliest tokens from logits whose vocabulary is split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from stages.data.batch import IGNORED


def wanted_log_probabilities(logits: Tensor, wanted: Tensor, vocab_size: int) -> Tensor:
    """Return log-probabilities of given tokens at every position, float32, 0 where there is no target; differentiable.

    The result has the shape of `wanted` and is the same on every tensor-parallel rank. `logits` is [rows, tokens,
    entries of this rank], `wanted` int64 [rows, tokens, number] with the target in the first place. Entries from
    `vocab_size` on are padding. `logits` must not be used afterwards: their memory is reused.
    """
    has_target = wanted[..., :1] != IGNORED  # [rows, tokens, 1], for all wanted tokens of a position
    logits, tokens = _without_padding(logits, vocab_size).float(), wanted.where(has_target, 0)
    if wanted.shape[-1] == 1:
        # Megatron's kernel is of one token at a position, and writes into the logits.
        found = -vocab_parallel_cross_entropy(logits, tokens.squeeze(-1)).unsqueeze(-1)
    else:
        found = _WantedLogProbabilities.apply(logits, tokens)
    return torch.where(has_target, found, 0.0)


def greedy_tokens(logits: Tensor, wanted: Tensor, vocab_size: int) -> Tensor:
    """Return the likeliest (first) token at each target, -100 elsewhere: int64 [rows, tokens, 1], on every rank.

    Arguments as in `wanted_log_probabilities`.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    largest, tokens = _without_padding(logits, vocab_size).float().max(-1)
    # each [ranks, rows, tokens]: a rank's largest logit, and its number in the whole vocabulary
    of_ranks = [_of_ranks(found, group) for found in (largest, tokens + group.rank() * logits.shape[-1])]
    rank = of_ranks[0].argmax(0, keepdim=True)
    return of_ranks[1].gather(0, rank)[0].unsqueeze(-1).where(wanted[..., :1] != IGNORED, IGNORED)


def likeliest_tokens(logits: Tensor, wanted: Tensor, vocab_size: int, *, number: int) -> Tensor:
    """Return the likeliest tokens at each target, then their log-probabilities: float32 [rows, tokens, 2 × number].

    Likeliest first, 0 elsewhere; fp32 holds tokens exactly below 2^24. Arguments as in `wanted_log_probabilities`.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    # Each rank's own candidates: the likeliest of all ranks are among the ranks' likeliest.
    own = _log_softmax(_without_padding(logits, vocab_size).float(), group)
    values, tokens = own.topk(min(number, own.shape[-1]))
    everyones = [_of_ranks(found, group) for found in (values, tokens + group.rank() * own.shape[-1])]
    values, tokens = (torch.cat(list(found), -1) for found in everyones)  # [rows, tokens, ranks × candidates]
    values, places = values.topk(number)
    found = torch.cat([tokens.gather(-1, places).float(), values], -1)
    return found.where(wanted[..., :1] != IGNORED, 0.0)


class _WantedLogProbabilities(torch.autograd.Function):
    """Autograd function for log-probabilities of several tokens per position, from logits split by vocabulary.

    d log p[token] / d logits = onehot(token) - p, as in `stages.engines.log_probabilities`.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        log_softmax = _log_softmax(logits, group)
        places = tokens - group.rank() * logits.shape[-1]
        # A token is on one rank: the others add 0, and the sum over ranks is its log-probability.
        is_own = (places >= 0) & (places < logits.shape[-1])
        places = places.where(is_own, 0)
        values = log_softmax.gather(-1, places).where(is_own, 0.0)
        dist.all_reduce(values, group=group)
        ctx.save_for_backward(log_softmax, places, is_own)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        log_softmax, places, is_own = ctx.saved_tensors
        # -p × Σ gradient on every rank's entries; the onehot only where the token is.
        result = log_softmax.exp().mul_(-gradients[0].sum(-1, keepdim=True))
        return result.scatter_add_(-1, places, gradients[0].where(is_own, 0.0)), None


def _log_softmax(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's share of the log-softmax over the whole vocabulary: [rows, tokens, entries of this rank]."""
    # The maximum of the whole vocabulary, or exp would overflow.
    largest = logits.max(-1, keepdim=True).values
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    total = (logits - largest).exp().sum(-1, keepdim=True)
    dist.all_reduce(total, group=group)
    return logits - (largest + total.log())


def _of_ranks(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather a tensor from all tensor-parallel ranks and stack the ranks' tensors: [ranks, …]."""
    everyones = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(everyones, values.contiguous(), group=group)
    return torch.stack(everyones)


def _without_padding(logits: Tensor, vocab_size: int) -> Tensor:
    first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
    num_real = max(0, vocab_size - first)
    if num_real >= logits.shape[-1]:
        return logits
    # -inf: padding has probability 0 and takes no part in the sum.
    is_padding = torch.arange(logits.shape[-1], device=logits.device) >= num_real
    return logits.masked_fill(is_padding, -torch.inf)
