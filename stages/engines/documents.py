"""Packed documents of a micro-batch: the keys that each token sees, and the padding of documents to one length.

Documents of similar length form a bucket, in which they are padded to one length. `pad_documents` and
`unpad_documents` move tensors there and back; they are each other's gradient. (Plain indexing would do, but its
backward pass adds up gradients one index at a time, although no slot has two tokens.)
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

LEAST_FILL = 0.8
"""Smallest ratio of shortest to longest document in a bucket; larger: less padding, but more kernel calls."""

BLOCK = 128
"""Number of queries, and of keys, in a block that FlexAttention computes or skips as a whole."""


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


@dataclass(frozen=True)
class VisibleKeys:
    """Range of keys that each query sees, among all keys in the order of the documents; it is never empty."""

    first: Tensor
    """Index of the first key that each query sees, int64 [queries]."""
    last: Tensor
    """Index of the last key that each query sees, int64 [queries]."""
    num_keys: int

    @cached_property
    def block_mask(self) -> BlockMask:
        """FlexAttention's mask: for each block of queries, the blocks of keys that all, or only some of them see.

        `create_block_mask` would make it from a mask of all pairs of positions; ranges need none.
        """
        first, last, num_queries = self.first, self.last, len(self.first)
        rows, columns = (-(-number // BLOCK) for number in (num_queries, self.num_keys))
        # The last block is filled up with its last query.
        index = torch.arange(rows * BLOCK, device=first.device).clamp(max=num_queries - 1)
        firsts, lasts = first[index].view(rows, BLOCK), last[index].view(rows, BLOCK)
        keys = BLOCK * torch.arange(columns, device=first.device)  # the first key of each block
        # bool [rows, columns]: some query may see some key of the block; every query sees all its keys
        is_seen = (keys + BLOCK > firsts.amin(1)[:, None]) & (keys <= lasts.amax(1)[:, None])
        is_whole = (keys >= firsts.amax(1)[:, None]) & (keys + BLOCK - 1 <= lasts.amin(1)[:, None])

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key >= first[query]) & (key <= last[query])

        return BlockMask.from_kv_blocks(
            *_listed(is_seen & ~is_whole),
            *_listed(is_whole),
            BLOCK_SIZE=BLOCK,
            mask_mod=sees,
            seq_lengths=(num_queries, self.num_keys),
        )

    @cached_property
    def mask(self) -> Tensor:
        """Mask of all pairs, bool [queries, keys]: True where the row's query sees the column's key."""
        return _between(torch.arange(self.num_keys, device=self.first.device), self.first, self.last)


class PackedDocuments:
    """Packed documents of a micro-batch, in their order in its flattened rows, and the padding of each.

    The shortest document of a bucket is at least `least_fill` of its longest; with 0 there is one bucket.
    """

    def __init__(
        self,
        lengths: Iterable[int],
        device: torch.device,
        least_fill: float = LEAST_FILL,
        *,
        blocks: Tensor | None = None,
        queries: Tensor | None = None,
        longest: int | None = None,
    ) -> None:
        """Describe documents of these `lengths` in tokens, in their order.

        longest: the same upper bound of lengths for all batches, since compiled code holds it as a constant.
        blocks: number of the block that each token is in, int64 [tokens] on the host, else -1. Tokens of a block follow
        each other, and all see each other (the tokens of an image in Gemma 3). queries: tokens for which attention is
        computed, int64 [queries] on `device`, if another process has the others (context parallelism); keys are of all
        tokens.
        """
        self.lengths = tuple(lengths)
        self.device = device
        self.least_fill = least_fill
        self.longest = longest or max(self.lengths)
        self.blocks = blocks
        self.queries = queries
        self.in_full_layers: PackedDocuments | None = None
        """Documents without blocks, for layers without a window, where blocks are for those with one (Gemma 4)."""
        self.attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor] | None = None
        """Attention with other processes that have tokens of these documents, of queries, keys, values and options."""
        self._visible: dict[int | None, VisibleKeys] = {}

    @cached_property
    def boundaries(self) -> Tensor:
        """Document boundaries in the flattened rows, int32 [documents + 1]: each start, and the end of the last."""
        lengths = torch.tensor((0, *self.lengths), dtype=torch.int32)
        # lengths [3, 2] -> boundaries [0, 3, 5]; int32 is what flash attention takes
        return lengths.cumsum(0, dtype=torch.int32).to(self.device)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def starts(self) -> Tensor:
        """Index of the first token of each token's document, int64 [tokens] on the host."""
        lengths = torch.tensor(self.lengths)
        return (lengths.cumsum(0) - lengths).repeat_interleave(lengths, output_size=self.num_tokens)

    def visible(self, window_tokens: int | None) -> VisibleKeys:
        """Return the keys that each query sees: of its document the last `window_tokens`, and its block to the end.

        They are computed once for each window, since all layers of a kind ask for the same.
        """
        if window_tokens not in self._visible:
            last = torch.arange(self.num_tokens)
            # The window limits what a block's tokens see before them, too, as in Transformers' Gemma 3.
            first = self.starts if window_tokens is None else torch.maximum(self.starts, last - window_tokens + 1)
            if self.blocks is not None:
                last = torch.where(self.blocks >= 0, self._block_ends(self.blocks), last)
            first, last = first.to(self.device), last.to(self.device)
            if self.queries is not None:
                first, last = first[self.queries], last[self.queries]
            self._visible[window_tokens] = VisibleKeys(first, last, self.num_tokens)
        return self._visible[window_tokens]

    def _block_ends(self, blocks: Tensor) -> Tensor:
        """Return the last token of the run of equal block numbers that each token is in, int64 [tokens]."""
        # A document's end ends its last block, too.
        is_last = torch.ones(self.num_tokens, dtype=torch.bool)
        is_last[:-1] = (blocks[1:] != blocks[:-1]) | (self.starts[1:] != self.starts[:-1])
        # blocks [0, 0, 1] -> last [1, 1, 2]: of all ends from a token on, the nearest
        ends = torch.where(is_last, torch.arange(self.num_tokens), self.num_tokens)
        return ends.flip(0).cummin(0).values.flip(0)

    def padded_mask(self, bucket: Bucket, window_tokens: int | None) -> Tensor:
        """Return which keys each padded position of a bucket sees in its document, bool [documents, length, length].

        Positions of padding see their document's first token, so that no softmax is of nothing.
        """
        visible = self.visible(window_tokens)
        ranges = torch.stack([visible.first, visible.last], 1) - self.starts.to(self.device)[:, None]
        padded = pad_documents(ranges, self)[bucket.start : bucket.end].view(bucket.num_documents, bucket.length, 2)
        return _between(torch.arange(bucket.length, device=self.device), *padded.unbind(2))

    @property
    def are_even(self) -> bool:
        """True if all documents have one length, so that packed tokens are padded ones already."""
        return len(set(self.lengths)) == 1

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

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Padded row of each document, and the document in each padded row, int64 [documents]; of one bucket."""
        document_of = torch.tensor(self.lengths).argsort(descending=True, stable=True)
        return document_of.argsort().to(self.device), document_of.to(self.device)

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
        shifts = (padded_starts - starts).repeat_interleave(lengths, output_size=self.num_tokens)
        return (torch.arange(self.num_tokens) + shifts).to(self.device)


def pad_documents(tokens: Tensor, documents: PackedDocuments) -> Tensor:
    """Copy packed tokens' values, [tokens, …], to padded documents, [padded positions, …], else 0; differentiable."""
    return tokens if documents.are_even else place_tokens(tokens, documents.slots, documents.num_slots)


def place_tokens(tokens: Tensor, slots: Tensor, num_slots: int) -> Tensor:
    """Copy tokens' values, [tokens, …], to their slots among `num_slots`, else 0; no two in one; differentiable."""
    return _Place.apply(tokens, slots, num_slots)


def unpad_documents(padded: Tensor, documents: PackedDocuments) -> Tensor:
    """Copy padded documents' values, [padded positions, …], back to packed tokens, [tokens, …]; differentiable."""
    return padded if documents.are_even else _Unpad.apply(padded, documents.slots, documents.num_slots)


class _Place(torch.autograd.Function):
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


def _between(columns: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Return bool […, columns]: True where a column is within the row's range; `first` and `last` are […]."""
    return (columns >= first[..., None]) & (columns <= last[..., None])


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many columns of each row are chosen, and all columns, the chosen ones first: int32, for all heads."""
    order = chosen.int().argsort(dim=1, descending=True, stable=True).int()
    return chosen.sum(1, dtype=torch.int32)[None, None], order[None, None].contiguous()
