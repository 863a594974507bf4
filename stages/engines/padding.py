"""Pad the documents of packed rows to the lengths of their buckets, and back; differentiable.

The two are each other's gradient. Plain indexing would do, but its backward pass adds up gradients one index at a
time, although no slot has two tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stages.engines.documents import PackedDocuments


def pad_documents(tokens: Tensor, documents: PackedDocuments) -> Tensor:
    """[tokens, …] → [slots, …], with zeros in padding."""
    return _Pad.apply(tokens, documents.slots, documents.num_slots)


def unpad_documents(padded: Tensor, documents: PackedDocuments) -> Tensor:
    """[slots, …] → [tokens, …]; padding is dropped."""
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
