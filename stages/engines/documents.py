"""Padding of packed documents: those of similar length form a bucket, in which they are padded to one length.

`pad_documents` and `unpad_documents` move tensors there and back; they are each other's gradient. (Plain indexing would
do, but its backward pass adds up gradients one index at a time, although no slot has two tokens.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

LEAST_FILL = 0.8
"""Smallest ratio of shortest to longest document in a bucket; larger: less padding, but more kernel calls."""


@dataclass(frozen=True)
class Bucket:
    """Group of `num_documents` documents padded to `length` tokens, from padded position `start` on."""

    start: int
    num_documents: int
    length: int

    @property
    def end(self) -> int:
        """Index after the bucket's last position, among the positions of all padded documents."""
        return self.start + self.num_documents * self.length


class PackedDocuments:
    """Packed documents of a micro-batch, in their order in its flattened rows, and the padding of each.

    The shortest document of a bucket is at least `least_fill` of its longest; with 0 there is one bucket.
    """

    def __init__(self, lengths: Iterable[int], device: torch.device, least_fill: float = LEAST_FILL) -> None:
        self.lengths = tuple(lengths)
        self.device = device
        self.least_fill = least_fill

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def boundaries(self) -> Tensor:
        """Document boundaries in the flattened rows, int32 [documents + 1]: each start, and the end of the last."""
        lengths = torch.tensor((0, *self.lengths), dtype=torch.int32)
        # lengths [3, 2] -> boundaries [0, 3, 5]; int32 is what flash attention takes
        return lengths.cumsum(0, dtype=torch.int32).to(self.device)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Buckets of documents of similar length, the longest first, without gaps between them."""
        buckets: list[Bucket] = []
        for length in sorted(self.lengths, reverse=True):
            last = buckets[-1] if buckets else None
            # Longest first: the bucket's length is that of its first document, and all others fit.
            if last and length >= self.least_fill * last.length:
                buckets[-1] = Bucket(last.start, last.num_documents + 1, last.length)
            else:
                buckets.append(Bucket(last.end if last else 0, 1, length))
        return buckets

    @property
    def num_slots(self) -> int:
        """Number of positions of all padded documents of a micro-batch, padding included."""
        return self.buckets[-1].end

    @cached_property
    def slots(self) -> Tensor:
        """Index of each token of the flattened rows among the padded positions, int64 [tokens]."""
        padded_lengths = [bucket.length for bucket in self.buckets for _ in range(bucket.num_documents)]
        lengths = torch.tensor(self.lengths)
        # Stable, so that equal lengths take padded places in the order of the rows.
        longest_first = lengths.argsort(descending=True, stable=True)
        padded_starts = torch.empty_like(lengths)
        # where each document begins among the padded positions
        padded_starts[longest_first] = torch.tensor([0, *padded_lengths[:-1]]).cumsum(0)
        starts = lengths.cumsum(0) - lengths  # where it begins in the flattened rows
        # lengths [2, 3]: padded starts [3, 0], starts [0, 2], shifts [3, 3, -2, -2, -2], slots [3, 4, 0, 1, 2]
        shifts = (padded_starts - starts).repeat_interleave(lengths)
        return (torch.arange(len(shifts)) + shifts).to(self.device)


def pad_documents(tokens: Tensor, documents: PackedDocuments) -> Tensor:
    """Copy packed tokens' values, [tokens, …], to padded documents, [padded positions, …], else 0; differentiable."""
    return _Pad.apply(tokens, documents.slots, documents.num_slots)


def unpad_documents(padded: Tensor, documents: PackedDocuments) -> Tensor:
    """Copy padded documents' values, [padded positions, …], back to packed tokens, [tokens, …]; differentiable."""
    return _Unpad.apply(padded, documents.slots, documents.num_slots)


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, slots: Tensor, num_slots: int) -> Tensor:
        ctx.save_for_backward(slots)
        return _scatter(tokens, slots, num_slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return gradients[0].index_select(0, slots), None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, slots: Tensor, num_slots: int) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.num_slots = num_slots
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return _scatter(gradients[0], slots, ctx.num_slots), None, None


def _scatter(tokens: Tensor, slots: Tensor, num_slots: int) -> Tensor:
    return tokens.new_zeros(num_slots, *tokens.shape[1:]).index_copy_(0, slots, tokens)
