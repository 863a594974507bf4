"""Logits that are split over tensor-parallel ranks by vocabulary → log-probabilities of targets, likeliest tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from stages.data.batch import IGNORED


def target_log_probabilities(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """float32 [rows, tokens], 0 where no target is; the same on every tensor-parallel rank. Differentiable.

    `logits` is [rows, tokens, entries of this rank], `targets` int64 [rows, tokens]. Entries from `vocab_size` on are
    padding of the vocabulary. `logits` must not be used afterwards: the memory is.
    """
    has_target = targets != IGNORED
    losses = vocab_parallel_cross_entropy(_without_padding(logits, vocab_size).float(), targets.where(has_target, 0))
    return torch.where(has_target, -losses, 0.0)


def greedy_tokens(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """The likeliest tokens, IGNORED where no target is: int64 [rows, tokens], the same on every rank.

    Arguments as above; the first of several that are equally likely.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    largest, tokens = _without_padding(logits, vocab_size).float().max(-1)
    of_ranks = [[torch.empty_like(found) for _ in range(group.size())] for found in (largest, tokens)]
    for everyones, own in zip(of_ranks, (largest, tokens + group.rank() * logits.shape[-1]), strict=True):
        dist.all_gather(everyones, own, group=group)
    rank = torch.stack(of_ranks[0]).argmax(0, keepdim=True)
    return torch.stack(of_ranks[1]).gather(0, rank)[0].where(targets != IGNORED, IGNORED)


def _without_padding(logits: Tensor, vocab_size: int) -> Tensor:
    first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
    num_real = max(0, vocab_size - first)
    if num_real >= logits.shape[-1]:
        return logits
    is_padding = torch.arange(logits.shape[-1], device=logits.device) >= num_real
    return logits.masked_fill(is_padding, -torch.inf)
