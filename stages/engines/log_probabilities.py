"""Log-probabilities of tokens from hidden states and an output head, without the logits of a whole batch.

Both engines compute them here. Only positions that have a target are sent through the head (which saves most of the
vocabulary work of chats), and their logits exist for one chunk at a time: at most `CHUNK_LOGITS` values. A chunk holds
all positions and some entries of the vocabulary, not some positions and all entries: the gradient of the head's rows is
then complete with their chunk and written once, in place and in the head's dtype. Chunks of positions would add up
gradients as large as the head, in fp32; here only those of the hidden states are added up, of which there are fewer.

A chunk gives each position its largest logit, its sum of exponentials of differences from that, and the logits of
wanted tokens that are in it: results of chunks join as those of tensor-parallel ranks do, which have consecutive
entries each (Shoeybi et al. 2019). Largest logit and sum stay two numbers: the logarithm of a sum of exp(logit) is as
large as a logit, and a confident token's log-probability, the small difference of both, would be as coarse as they are.

Bytes of a logit in bf16: alive at the peak are 8, the head's output (2), its exponential in fp32 (4) and the gradient
(2); a soft cap takes 2 more. To and from memory go at most 16, if compiled: the output is written and, for maximum and
sum, read twice (6), computed again in the backward pass (2), read and turned into its gradient (4), which two products
read (4). With fewer, products would have to keep logits in registers (Wijmans et al. 2024), in kernels of our own. One
chunk alone saves 2 of them, since its output is kept. (Liger's fused loss gives no log-probabilities of single tokens,
which preference losses need, and does the head's backward work before it knows the weight of each token.)
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from stages.data.batch import IGNORED

CHUNK_LOGITS = 2**27
"""Number of logits in memory at a time (512 MiB in fp32): 32,768 entries for 4,096 tokens keep a large GPU busy."""
ALIGNED_ENTRIES = 64
"""Divisor of a chunk's number of entries, which makes rows of its logits begin where tensor cores want them."""


@dataclass(frozen=True)
class LogitsTransform:
    """Element-wise function of fp32 logits z: scale × z or, with a soft cap, scale × cap × tanh(z / cap)."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Return transformed logits; the same tensor if there is nothing to do."""
        if self.softcap:
            # in place on a tensor of its own: one for each operation would be alive together
            return (logits / self.softcap).tanh_().mul_(self.softcap * self.scale)
        return logits if self.scale == 1 else logits * self.scale

    def backward_(self, gradient: Tensor, transformed: Tensor) -> Tensor:
        """Turn the gradient by transformed logits into that by the logits, in place; the other argument too is used up.

        transformed: the function's result, which is finite.
        """
        if self.softcap:
            # d tanh(x) = 1 - tanh(x)²
            gradient.mul_(transformed.div_(self.scale * self.softcap).square_().neg_().add_(1))
        return gradient if self.scale == 1 else gradient.mul_(self.scale)


@dataclass(frozen=True)
class OutputHead:
    """Output head of a causal language model, or a tensor-parallel rank's share of one."""

    weight: Tensor
    """Rows of the vocabulary's entries, [entries, width]; with a group those of this rank, equally many on each."""
    bias: Tensor | None = None
    transform: LogitsTransform = field(default_factory=LogitsTransform)
    group: dist.ProcessGroup | None = None
    """Tensor-parallel ranks that have consecutive entries of the vocabulary; None: this process has them all."""
    vocab_size: int | None = None
    """Number of real entries of the vocabulary. Entries after them are padding, never predicted; None: no padding."""
    compiles: bool = False
    """True to compile what is done to logits between matrix products, so that they are read and written less often."""

    @property
    def first(self) -> int:
        """Number of this rank's first entry in the whole vocabulary."""
        return self.group.rank() * len(self.weight) if self.group else 0

    def chunks(self, num_positions: int) -> list[slice]:
        """Return this rank's entries in chunks, of at least one entry and at most `CHUNK_LOGITS` logits."""
        size = max(1, CHUNK_LOGITS // max(1, num_positions))
        if size > ALIGNED_ENTRIES:
            size -= size % ALIGNED_ENTRIES
        return [slice(start, min(start + size, len(self.weight))) for start in range(0, len(self.weight), size)]

    def output(self, hidden: Tensor, chunk: slice) -> Tensor:
        """Return the head's product for a chunk of entries, [positions, entries], in the head's dtype."""
        return functional.linear(hidden, self.weight[chunk], None if self.bias is None else self.bias[chunk])

    def num_real(self, chunk: slice) -> int:
        """Return how many entries of a chunk are not padding; they come first."""
        size = chunk.stop - chunk.start
        return size if self.vocab_size is None else min(max(0, self.vocab_size - self.first - chunk.start), size)

    def places(self, tokens: Tensor, chunk: slice) -> tuple[Tensor, Tensor | None]:
        """Return the place of each token among a chunk's entries, and where it is among them; None: everywhere."""
        size = chunk.stop - chunk.start
        if self.group is None and size == len(self.weight):
            return tokens, None
        places = tokens - (self.first + chunk.start)
        clamped = places.clamp(0, size - 1)
        return clamped, places == clamped

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _compiled(function) if self.compiles else function


def token_log_probabilities(hidden: Tensor, head: OutputHead, wanted: Tensor, positions: Tensor) -> Tensor:
    """Return log-probabilities of given tokens at every position of a batch, 0 where none is given; differentiable.

    `hidden` is [rows, sequence, width], `wanted` int64 [rows, sequence] or [rows, sequence, number], `positions` int64
    [targets]: indices of the flattened rows where tokens are given. The result is float32 of the shape of `wanted`, the
    same on every tensor-parallel rank; on each, gradients of `hidden` are those of its entries, to be summed. Under
    FSDP2 this belongs into the forward of the module that gathers the head's weight.
    """
    return _LogProbabilities.apply(hidden, head.weight, head.bias, head, wanted, positions)


@torch.no_grad()
def greedy_tokens(hidden: Tensor, head: OutputHead, wanted: Tensor, positions: Tensor) -> Tensor:
    """Return the likeliest (first) token at every position that has a target, -100 elsewhere; int64 [rows, sequence].

    Arguments as in `token_log_probabilities`.
    """
    _, tokens = _likeliest(hidden, head, positions, 1)
    result = torch.full(wanted.shape[:2], IGNORED, device=wanted.device)
    result.view(-1).index_copy_(0, positions, tokens.squeeze(1))
    return result


@torch.no_grad()
def likeliest_tokens(hidden: Tensor, head: OutputHead, wanted: Tensor, positions: Tensor, *, number: int) -> Tensor:
    """Return the `number` likeliest tokens at every target and their log-probabilities, the likeliest first.

    float32 [rows, sequence, 2, number], which holds tokens exactly below 2^24; 0 elsewhere. Arguments:
    `token_log_probabilities`.
    """
    values, tokens = _likeliest(hidden, head, positions, number)
    result = values.new_zeros(*wanted.shape[:2], 2, number)
    result.view(-1, 2, number).index_copy_(0, positions, torch.stack([tokens.float(), values], 1))
    return result


def tempered(transform: LogitsTransform, temperature: float) -> LogitsTransform:
    """Return a function that applies the model's logits transform, then divides by the sampling temperature."""
    return replace(transform, scale=transform.scale / temperature)


class _LogProbabilities(torch.autograd.Function):
    """Autograd function for log-probabilities of tokens at selected positions, computed in chunks of logits.

    With z = transform(W h + b) and p = softmax(z), d log p[token] / dz = onehot(token) - p.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: OutputHead,
        wanted: Tensor,
        positions: Tensor,
    ) -> Tensor:
        selected = hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions)  # [positions, width]
        tokens = wanted.reshape(hidden.shape[0] * hidden.shape[1], -1).index_select(0, positions)  # [positions, number]
        chunks = head.chunks(len(positions))
        sums: list[tuple[Tensor, Tensor]] = []
        wanted_logits = torch.zeros(tokens.shape, dtype=torch.float32, device=hidden.device)
        for chunk in chunks:
            output = head.output(selected, chunk)
            places, is_here = head.places(tokens, chunk)
            largest, total, of_chunk = head.kernel(_reduced)(output, places, head.transform, head.num_real(chunk))
            sums.append((largest, total))
            # A token is in one chunk of one rank: the others add 0.
            wanted_logits += of_chunk if is_here is None else of_chunk.where(is_here, 0.0)
        largest, total, wanted_logits = _joined(sums, wanted_logits, head.group)
        kept = output if len(chunks) == 1 and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(selected, tokens, positions, largest, total, kept)
        ctx.head, ctx.chunks, ctx.shape = head, chunks, hidden.shape
        # Filled through a view: FSDP2 warns of a root module that returns one.
        result = torch.zeros(wanted.shape, dtype=torch.float32, device=hidden.device)
        result.view(-1, tokens.shape[1]).index_copy_(0, positions, (wanted_logits - largest) - total.log())
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        selected, tokens, positions, largest, total, kept = ctx.saved_tensors
        head, (learns_hidden, learns_weight, learns_bias, *_) = ctx.head, ctx.needs_input_grad
        gradient = gradients[0].reshape(-1, tokens.shape[1]).index_select(0, positions)  # [positions, number]
        scale = -gradient.sum(1, keepdim=True) / total  # that of exp(logits - largest), in -Σ gradient × p
        weight_gradient = torch.empty_like(head.weight) if learns_weight else None
        bias_gradient = torch.empty_like(head.bias) if learns_bias else None
        # fp32, since a sum of chunks in bf16 loses digits
        sum_dtype = torch.float32 if len(ctx.chunks) > 1 else selected.dtype
        selected_gradient = torch.zeros_like(selected, dtype=sum_dtype)
        for chunk in ctx.chunks:
            output = head.output(selected, chunk) if kept is None else kept
            places, is_here = head.places(tokens, chunk)
            own = gradient if is_here is None else gradient.where(is_here, 0.0)
            arguments = (largest, scale, places, own, head.transform, head.num_real(chunk))
            output_gradient = head.kernel(_output_gradient)(output, *arguments)
            del output  # before another chunk's is made
            if learns_hidden:
                selected_gradient += output_gradient @ head.weight[chunk]
            if weight_gradient is not None:
                torch.mm(output_gradient.T, selected, out=weight_gradient[chunk])
            if bias_gradient is not None:
                torch.sum(output_gradient, 0, out=bias_gradient[chunk])
            del output_gradient
        # Back to all positions; those without a target have a zero gradient.
        hidden_gradient = selected.new_zeros(ctx.shape)
        hidden_gradient.view(-1, ctx.shape[-1]).index_copy_(0, positions, selected_gradient.to(selected.dtype))
        # None: head, wanted and positions
        return hidden_gradient, weight_gradient, bias_gradient, None, None, None


def _reduced(output: Tensor, places: Tensor, transform: LogitsTransform, num_real: int) -> tuple[Tensor, ...]:
    """Return each position's largest logit, its Σ exp(logit - largest) and its logits at places.

    float32: [positions, 1], [positions, 1], [positions, number].
    """
    logits = _logits(output, transform, num_real)
    found = logits.gather(1, places)
    # Finite, also on a rank that has nothing but padding: -inf - -inf would be NaN.
    largest = logits.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    total = _minus(logits, largest, output, transform).exp_().sum(1, keepdim=True)
    return largest, total, found


def _minus(logits: Tensor, values: Tensor, output: Tensor, transform: LogitsTransform) -> Tensor:
    """Return logits - values, in their memory unless it may be that of the head's output."""
    is_output = output.dtype == torch.float32 and transform == LogitsTransform()
    return logits - values if is_output else logits.sub_(values)


def _logits(output: Tensor, transform: LogitsTransform, num_real: int) -> Tensor:
    # The product is in the head's dtype, the softmax over it in fp32.
    logits = transform(output.float())
    if num_real < logits.shape[1]:
        logits[:, num_real:] = -torch.inf  # padding has probability 0
    return logits


def _output_gradient(
    output: Tensor,
    largest: Tensor,
    scale: Tensor,
    places: Tensor,
    gradient: Tensor,
    transform: LogitsTransform,
    num_real: int,
) -> Tensor:
    """Return the gradient of Σ gradient × log p[token] by the head's output, [positions, entries], in its dtype.

    `gradient` is [positions, number], 0 for tokens that are elsewhere. `largest` and `scale` are [positions, 1]: the
    largest logit, and -Σ gradient (with theirs) over Σ exp(logit - largest).
    """
    logits = transform(output.float())
    # The derivative of a soft cap needs the logits again.
    difference = logits - largest if transform.softcap else _minus(logits, largest, output, transform)
    result = difference.exp_().mul_(scale)
    if num_real < result.shape[1]:
        result[:, num_real:] = 0.0
    if torch.compiler.is_compiling() and places.shape[1] == 1:
        # Compiled, a scatter would be a kernel of its own, with its result in memory in fp32.
        result = result + gradient.where(torch.arange(result.shape[1], device=places.device) == places, 0.0)
    else:
        # Each token's own gradient comes on top. A token that is wanted twice gets both.
        result.scatter_add_(1, places, gradient)
    result = transform.backward_(result, logits)
    del logits  # before the result is copied
    return result.to(output.dtype)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Numbers of positions and of a chunk's entries vary: one compilation for all.
    return torch.compile(function, dynamic=True, fullgraph=True)


def _joined(
    sums: list[tuple[Tensor, Tensor]], wanted_logits: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Join chunks' largest logits and sums of exp(logit - largest), and all ranks' logits of wanted tokens.

    The first two are [positions, 1] each, the last is [positions, number].
    """
    largests, totals = (torch.stack(values) for values in zip(*sums, strict=True))  # [chunks, positions, 1]
    largest = largests.amax(0)
    if group is not None and len(wanted_logits):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    # Differences from the largest of all chunks and ranks, or exp would overflow.
    total = ((largests - largest).exp_() * totals).sum(0)
    if group is not None and len(wanted_logits):
        reduced = torch.cat([total, wanted_logits], 1)  # [positions, 1 + number]
        dist.all_reduce(reduced, group=group)
        total, wanted_logits = reduced[:, :1], reduced[:, 1:]
    return largest, total, wanted_logits


def _likeliest(hidden: Tensor, head: OutputHead, positions: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and numbers of the likeliest tokens at selected positions, each [positions, number]."""
    selected = hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions)  # [positions, width]
    sums: list[tuple[Tensor, Tensor]] = []
    values: list[Tensor] = []
    tokens: list[Tensor] = []
    for chunk in head.chunks(len(positions)):
        logits = _logits(head.output(selected, chunk), head.transform, head.num_real(chunk))
        # The likeliest of all chunks and ranks are among the likeliest of each.
        likeliest, places = _largest(logits, number)
        # Finite, also where there is nothing but padding.
        largest = likeliest[:, :1].clamp(min=torch.finfo(torch.float32).min)
        sums.append((largest, (logits - largest).exp_().sum(1, keepdim=True)))
        values.append(likeliest)
        tokens.append(places + (head.first + chunk.start))
    largest, total, _ = _joined(sums, logits[:, :0], head.group)
    # [positions, candidates]
    candidates, their_tokens = torch.cat(values, 1), torch.cat(tokens, 1)
    if head.group and len(positions):
        candidates, their_tokens = (_of_ranks(one, head.group) for one in (candidates, their_tokens))
    likeliest, places = _largest(candidates, number)
    return (likeliest - largest) - total.log(), their_tokens.gather(1, places)


def _largest(values: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the largest values of each row and their places, the largest first; of equal ones alone the first."""
    # `topk` takes any of equal values
    found = values.max(1, keepdim=True) if number == 1 else values.topk(min(number, values.shape[1]))
    return found.values, found.indices


def _of_ranks(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather a tensor [positions, candidates] from all tensor-parallel ranks, side by side."""
    everyones = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(everyones, values.contiguous(), group=group)
    return torch.cat(everyones, 1)
