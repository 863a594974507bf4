"""Logits that are split over tensor-parallel ranks by vocabulary → log-probabilities of the target tokens."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from stages.data.batch import IGNORED


def target_log_probabilities(logits: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """float32 [rows, tokens], 0 where no target is; the same on every tensor-parallel rank. Differentiable.

    `logits` is [rows, tokens, entries of this rank], `targets` int64 [rows, tokens]. Entries from `vocab_size` on are
    padding of the vocabulary. `logits` must not be used afterwards: the memory is.
    """
    first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
    num_real = max(0, vocab_size - first)
    if num_real < logits.shape[-1]:
        is_padding = torch.arange(logits.shape[-1], device=logits.device) >= num_real
        logits = logits.masked_fill(is_padding, -torch.inf)
    has_target = targets != IGNORED
    losses = vocab_parallel_cross_entropy(logits.float(), targets.where(has_target, 0))
    return torch.where(has_target, -losses, 0.0)
