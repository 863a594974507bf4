"""Context parallelism: each process computes a slice of a micro-batch's tokens; attention exchanges heads for tokens.

The rows become one sequence, padded at the end by one more document until it divides, of which each process has
consecutive tokens. What is done to single tokens needs nothing else. Attention needs whole documents: the processes
send each other heads of their tokens, so that each has all tokens of some heads, and send the results back (Ulysses,
Jacobs et al. 2023). Heads of keys and values are fewer; where they do not divide, each is copied as often as it takes.
Where heads of queries do not divide, keys and values of all tokens are gathered instead.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from stages.data.batch import IGNORED, ModelInputs, Signal
from stages.engines.attention_kernels import AttentionOptions, attend
from stages.engines.documents import PackedDocuments


@dataclass(frozen=True)
class TokenSlice:
    """Consecutive tokens of a micro-batch's flattened rows that this process computes; the last may be padding."""

    group: dist.ProcessGroup
    """Processes that have a slice of the same tokens each, in order."""
    lengths: Sequence[int]
    """Number of tokens of each document, in the order of the flattened rows."""
    device: torch.device

    @cached_property
    def size(self) -> int:
        """Number of tokens of each process, padding included."""
        return -(-sum(self.lengths) // self.group.size())

    @property
    def start(self) -> int:
        """Index of this process's first token in the flattened rows."""
        return self.group.rank() * self.size

    @property
    def end(self) -> int:
        """Index after this process's last token."""
        return self.start + self.size

    @property
    def num_padding(self) -> int:
        """Number of tokens of padding after the rows."""
        return self.size * self.group.size() - sum(self.lengths)

    @cached_property
    def documents(self) -> PackedDocuments:
        """Documents of all processes' tokens, of which padding is the last."""
        documents = PackedDocuments((*self.lengths, *([self.num_padding] * (self.num_padding > 0))), self.device)
        documents.attend = self.attend
        return documents

    @cached_property
    def seen(self) -> tuple[PackedDocuments, int]:
        """Documents of this process's tokens, from their beginning to this process's last token, and their start."""
        lengths, first, begin = [], self.start, 0
        for length in self.documents.lengths:
            if begin < self.end and begin + length > self.start:
                first = min(first, begin)
                lengths.append(min(begin + length, self.end) - begin)
            begin += length
        return PackedDocuments(lengths, self.device), first

    def of(self, values: Tensor, padding: int = 0) -> Tensor:
        """Return this process's part of values of tokens, [rows, sequence, …], as one row, [1, tokens, …]."""
        tokens = values.flatten(0, 1)[self.start : self.end]
        missing = self.size - len(tokens)
        return pad(tokens, (0, 0) * (tokens.ndim - 1) + (0, missing), value=padding).unsqueeze(0)

    def of_inputs(self, inputs: ModelInputs) -> ModelInputs:
        """Return the model's inputs with this process's tokens in one row; documents are those of all processes."""
        return replace(inputs, input_ids=self.of(inputs.input_ids), position_ids=self.of(self.positions(inputs)))

    def positions(self, inputs: ModelInputs) -> Tensor:
        """Return the position in its document of each token of all processes, padding included, int64 [1, tokens]."""
        own = inputs.position_ids.flatten()
        return torch.cat([own, torch.arange(self.num_padding, device=own.device)]).unsqueeze(0)

    def wanted(self, signal: Signal) -> tuple[Tensor, Tensor]:
        """Return this process's part of the wanted tokens, [1, tokens] or [1, tokens, number], and where targets are.

        The latter are indices among this process's tokens, int64 [targets].
        """
        positions = self.own_positions(signal) if signal.own_positions is None else signal.own_positions
        return self.of(signal.targets if signal.candidates is None else signal.wanted, IGNORED), positions

    def own_positions(self, signal: Signal) -> Tensor:
        """Return the indices of those with loss among this process's tokens, int64 [targets]; an accelerator waits."""
        positions = signal.target_positions - self.start
        return positions[(positions >= 0) & (positions < self.size)]

    def gathered(self, values: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the values of all processes' tokens, from [1, tokens, …], as those of rows, [rows, sequence, …].

        Every process must compute the same from the result: its gradient is its part of the result's, no sum.
        """
        return _GatherRows.apply(values, self, (*shape, *values.shape[2:]))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Return attention of this process's tokens within the documents of all, [tokens, heads, value width].

        query: [tokens, heads, head width] of this process's tokens. key, value: theirs, [tokens, key and value heads,
        width].
        """
        number = self.group.size()
        if query.shape[1] % number:
            return self._attend_to_gathered(query, key, value, options)
        # Consecutive query heads share a head of keys; copies keep that order.
        copies = math.lcm(key.shape[1], number) // key.shape[1]
        if copies > 1:
            key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))
        query, key, value = (_Exchange.apply(states, self.group, True) for states in (query, key, value))
        if options.sinks is not None:
            options = replace(options, sinks=options.sinks.chunk(number)[self.group.rank()])
        return _Exchange.apply(attend(query, key, value, self.documents, options), self.group, False)

    def _attend_to_gathered(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        documents, first = self.seen
        key, value = (_GatherStates.apply(states, self.group)[first : self.end] for states in (key, value))
        # Queries of other processes' tokens are zeros: any kernel takes these, and none needs a mask of all pairs.
        query = pad(query, (0, 0, 0, 0, self.start - first, 0))
        return attend(query, key, value, documents, options)[self.start - first :]


class _Exchange(torch.autograd.Function):
    """All tokens of some heads from some tokens of all heads, or the other way round; each is the other's gradient."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchanged(states, group, to_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _exchanged(gradients[0], ctx.group, not ctx.to_heads), None, None


def _exchanged(states: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
    """Return [tokens of all, heads ÷ processes, width] of [tokens, heads, width], or the other way round."""
    number = group.size()
    # The first dimension is the process that gets a part, [processes, tokens of one, heads of one, width].
    sent = states.unflatten(1, (number, -1)).transpose(0, 1) if to_heads else states.unflatten(0, (number, -1))
    sent = sent.contiguous()
    received = torch.empty_like(sent)  # and here that which sent it
    dist.all_to_all_single(received, sent, group=group)
    return received.flatten(0, 1) if to_heads else received.transpose(0, 1).flatten(1, 2)


class _GatherStates(torch.autograd.Function):
    """States of all processes' tokens, [tokens of all, …]; gradients by all processes' tokens are summed."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(states, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        sent = gradients[0].contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.group)
        return received.unflatten(0, (ctx.group.size(), -1)).sum(0), None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, part: TokenSlice, shape: tuple[int, ...]) -> Tensor:
        ctx.part = part
        whole = _gathered(values.squeeze(0), part.group)
        return whole[: sum(part.lengths)].reshape(shape).clone()  # FSDP2 warns of a root module that returns a view

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.part.of(gradients[0]), None, None


def _gathered(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tokens of all processes, in order, of [tokens, …]."""
    everyones = [torch.empty_like(states) for _ in range(group.size())]
    dist.all_gather(everyones, states.contiguous(), group=group)
    return torch.cat(everyones)
