"""Split of a micro-batch's tokens over context-parallel ranks (zigzag), and their padding.

All rows become one sequence, in which every document is padded until 2 × ranks chunks of equal length make it up. Rank
r takes the r-th and the r-th from the end, so that causal attention is the same amount of work everywhere (Llama 3,
section 3.3.2; what Transformer Engine's kernels expect). All micro-batches of a step get the same length, since
pipeline stages exchange tensors of one shape: padding is one more document at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from stages.data.batch import Batch


@dataclass(frozen=True)
class TokenSplit:
    """Assignment of one micro-batch's tokens to context-parallel ranks."""

    lengths: tuple[int, ...]
    """Length of every document in tokens, padding included. The lengths add up to the tokens of all ranks."""
    origins: Tensor
    """Index in the flattened rows of each token, int64 [ranks, tokens of a rank]; `num_tokens` for padding."""
    positions: Tensor
    """Position of each token in its document, int64 [ranks, tokens of a rank]."""
    places: Tensor
    """Index of each token among all padded documents, in their order, int64 [ranks, tokens of a rank]."""
    num_tokens: int
    """Number of tokens in the flattened rows, before padding."""
    target_positions: tuple[Tensor, ...]
    """Indices of those that have a target among the tokens of each rank, each int64 [targets of the rank]."""

    def local(self, values: Tensor, rank: int, padding: int) -> Tensor:
        """Return the values, from int64 [rows, sequence, …], of one rank's tokens, [1, tokens of a rank, …]."""
        # [rows × sequence + 1, …]: `origins` point to the last place for padding
        padded = torch.cat([values.flatten(0, 1), values.new_full((1, *values.shape[2:]), padding)])
        return padded[self.origins[rank]].unsqueeze(0)

    def to(self, device: torch.device) -> TokenSplit:
        origins, positions, places = (part.to(device) for part in (self.origins, self.positions, self.places))
        targets = tuple(part.to(device) for part in self.target_positions)
        return TokenSplit(self.lengths, origins, positions, places, self.num_tokens, targets)


def padded_size(micro_batches: Iterable[Batch], num_ranks: int, divisor: int) -> int:
    """Return the tokens to which all micro-batches of a step are padded, so that they split evenly.

    A multiple of 2 × ranks, and a rank's tokens of `divisor`: `tp` under sequence parallelism,which splits further.
    """
    # The longest micro-batch of this process's step: all others are filled up to it.
    most = max(sum(_padded_lengths(batch, num_ranks)) for batch in micro_batches)
    multiple = math.lcm(_chunks(num_ranks), num_ranks * divisor)
    return -(-most // multiple) * multiple


def split_tokens(batch: Batch, num_ranks: int, size: int) -> TokenSplit:
    """Split a micro-batch on the host, padded to `size` tokens, over `num_ranks` context-parallel ranks."""
    lengths = torch.tensor(batch.documents.lengths)
    num_tokens = int(lengths.sum())
    padded = torch.tensor(_padded_lengths(batch, num_ranks))
    rest = size - int(padded.sum())  # padding at the end, as one more document
    padded = torch.cat([padded, torch.tensor([rest])]) if rest else padded
    starts = padded.cumsum(0) - padded  # lengths [4, 8] -> starts [0, 4]
    document_ids = torch.arange(len(padded)).repeat_interleave(padded)  # lengths [2, 3] -> [0, 0, 1, 1, 1]
    positions = torch.arange(size) - starts[document_ids]
    own_starts = lengths.cumsum(0) - lengths  # in the flattened rows, without padding
    # [tokens]: place of each token of the rows in the padded sequence
    slots = torch.arange(num_tokens) + (starts[: len(lengths)] - own_starts).repeat_interleave(lengths)
    origins = torch.full((size,), num_tokens)
    # the inverse: which token is at each place; `num_tokens` stays where padding is
    origins[slots] = torch.arange(num_tokens)
    held = _zigzag(positions, padded[document_ids], num_ranks)
    origins = origins[held]
    # [ranks, tokens of a rank]; padding comes from a last place that has no target
    has_target = functional.pad(batch.signal.has_target.flatten(), (0, 1))[origins]
    targets = tuple(of_rank.nonzero().squeeze(1) for of_rank in has_target)
    return TokenSplit(tuple(padded.tolist()), origins, positions[held], held, num_tokens, targets)


def gather_tokens(values: Tensor, split: TokenSplit, group: dist.ProcessGroup) -> Tensor:
    """Gather token values, [1, tokens of a rank, …], in the order of the flattened rows, [tokens, …]; differentiable.

    Every rank must compute the same from the result:its gradient is its part of the result's, no sum.
    """
    return _GatherTokens.apply(values, split, group)


def _chunks(num_ranks: int) -> int:
    return 2 * num_ranks if num_ranks > 1 else 1


def _padded_lengths(batch: Batch, num_ranks: int) -> list[int]:
    multiple = _chunks(num_ranks)
    return [-(-length // multiple) * multiple for length in batch.documents.lengths]


def _zigzag(positions: Tensor, lengths: Tensor, num_ranks: int) -> Tensor:
    """Return which tokens each context-parallel rank holds in zigzag order, int64 [ranks, tokens of a rank]."""
    if num_ranks == 1:
        return torch.arange(len(positions)).unsqueeze(0)
    # 2 ranks, a document of 8: chunks [0, 0, 1, 1, 2, 2, 3, 3] -> ranks [0, 0, 1, 1, 1, 1, 0, 0]
    chunk = positions // (lengths // _chunks(num_ranks))
    rank = torch.minimum(chunk, _chunks(num_ranks) - 1 - chunk)
    # each rank has equally many tokens, so that sorted by rank they are a matrix with a row for each
    return rank.argsort(stable=True).view(num_ranks, -1)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, split: TokenSplit, group: dist.ProcessGroup) -> Tensor:
        ctx.own_origins = split.origins[group.rank()]
        everyones = [torch.empty_like(values) for _ in range(group.size())]
        dist.all_gather(everyones, values.contiguous(), group=group)
        whole = values.new_zeros(split.num_tokens + 1, *values.shape[2:])
        # [1, tokens of all ranks, …], in the order of the ranks as `origins` are; padding lands on the last place
        whole[split.origins.flatten()] = torch.cat(everyones, dim=1).squeeze(0)
        return whole[:-1].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # The last place, to which `origins` of padding point, has gradient 0.
        padded = torch.cat([gradients[0], torch.zeros_like(gradients[0][:1])])
        return padded[ctx.own_origins].unsqueeze(0), None, None
