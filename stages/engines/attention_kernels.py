"""Attention over packed documents, and the table of kernels that compute it.

`attend` takes documents, sliding windows, soft caps, sinks and blocks of tokens that see each other, and computes by
the first kernel in the device's list (`stages/parallel/device_types.py`) that supports what is asked:

- `cudnn`: cuDNN's kernel, where all documents have one length: on an H100 it takes two thirds of flash's time. It makes
  a plan for each new length, which takes longer than the attention of many steps, so that the length is a multiple of
  1024 tokens; cuDNN's variable lengths, through torch 2.11, made a plan in each call and gave wrong gradients.
- `flash`: variable lengths, by `torch.nn.attention.varlen`.
- `efficient`: torch's memory-efficient kernel, over documents padded in buckets of similar length.
- `flex`: FlexAttention, compiled, which skips what no query sees by blocks of 128 tokens.
- `padded`: torch's SDPA, or products where scores are changed, in the same buckets. GPUs do not have it in their lists:
  SDPA may take its math kernel there, which holds all pairs of positions in memory.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch.nn.attention.varlen import varlen_attn

from stages.core.errors import ModelError
from stages.engines.documents import PackedDocuments, pad_documents, unpad_documents
from stages.parallel.accelerator import capability_of, of_device

SWITCH = "LIFECYCLE_ATTENTION"
"""Environment variable that names a kernel to take where it can compute what is asked, such as `flash`."""

PLANNED_TOKENS = 1024
"""Divisor of the lengths of documents for which cuDNN makes plans."""

GROUPS_QUERIES = "enable_gqa" in signature(varlen_attn).parameters
"""True if torch's flash attention takes fewer key and value heads than query heads, as it does from 2.13 on."""

Feature = Literal[
    "sliding window",
    "soft cap",
    "sinks",
    "blocks",
    "dropout",
    "context parallelism",
    "documents of any length",
    "the same bits each time",
]


@dataclass(frozen=True)
class AttentionOptions:
    """Options by which architectures change attention: scale, dropout, sliding window, soft cap and sinks."""

    scaling: float | None = None
    dropout: float = 0.0
    window_tokens: int | None = None
    """Size of the sliding attention window in tokens, the token itself included; None: no window."""
    softcap: float | None = None
    """Soft cap of attention scores, which become softcap × tanh(score / softcap) (Gemma 2)."""
    sinks: Tensor | None = None
    """Attention sinks [heads]: scores of an absent token, which takes a share of the attention weights (gpt-oss)."""


@dataclass(frozen=True)
class Request:
    """Attention that a kernel is asked for; everything that the choice of the kernel depends on."""

    device: str
    """Name of the kind of device in `DEVICE_TYPES`."""
    capability: tuple[int, int] | None
    """Compute capability of the device; None if it has no such number."""
    dtype: torch.dtype
    head_width: int
    value_width: int
    features: frozenset[Feature]
    in_graph: bool = False
    """True if a compiled layer asks, of which the attention must be a part."""


Compute = Callable[[Tensor, Tensor, Tensor, PackedDocuments, AttentionOptions], Tensor]
"""Type of a kernel's function of queries [queries, heads, head width], keys, values, documents and options."""


@dataclass(frozen=True)
class Kernel:
    """Attention kernel, with what it supports."""

    compute: Compute
    features: frozenset[Feature]
    dtypes: Mapping[torch.dtype, tuple[int, int]] = field(default_factory=dict)
    """Lowest compute capability for each dtype that the kernel takes; empty: any dtype on any device."""
    widest_head: int | None = None
    has_one_width: bool = False
    """True if values must be as wide as keys."""
    aligned_bytes: int = 1
    """Bytes that the width of a head must be a multiple of."""
    has_fixed_shapes: bool = True
    """True if no tensor's shape depends on the lengths of documents, with which compiled code would be compiled again.
    """

    def problems(self, request: Request) -> Iterator[str]:
        """Yield why the kernel cannot compute the attention; nothing if it can."""
        if missing := request.features - self.features:
            yield f"has no {' and no '.join(sorted(missing))}"
        name, widths = str(request.dtype).removeprefix("torch."), (request.head_width, request.value_width)
        lowest = self.dtypes.get(request.dtype)
        if self.dtypes and lowest is None:
            yield f"does not take {name}"
        elif lowest and request.capability and request.capability < lowest:
            needed, capability = (".".join(map(str, one)) for one in (lowest, request.capability))
            yield f"takes {name} from compute capability {needed} on, and this device has {capability}"
        if self.widest_head and max(widths) > self.widest_head:
            yield f"takes heads up to {self.widest_head} wide, not {max(widths)}"
        if self.has_one_width and widths[0] != widths[1]:
            yield f"wants values as wide as keys, not {widths[1]} beside {widths[0]}"
        if any(width * request.dtype.itemsize % self.aligned_bytes for width in widths):
            yield f"wants heads of a multiple of {self.aligned_bytes} bytes"
        if request.in_graph and not self.has_fixed_shapes:
            yield "cannot be part of a compiled layer"


def attend(query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments, options: AttentionOptions) -> Tensor:
    """Return causal attention within each packed document, [queries, heads, value width].

    query: [queries, heads, head width]. key, value: [tokens, key and value heads, width]. Raises ModelError where no
    kernel of the device can compute it.
    """
    features: list[Feature] = []
    # A window at least as long as the documents hides nothing.
    if options.window_tokens is not None and options.window_tokens < documents.longest:
        features.append("sliding window")
    if options.softcap is not None:
        features.append("soft cap")
    if options.sinks is not None:
        features.append("sinks")
    if options.dropout:
        features.append("dropout")
    if documents.blocks is not None:
        features.append("blocks")
    if documents.queries is not None:
        features.append("context parallelism")
    in_graph = torch.compiler.is_compiling()
    # A compiled layer must not depend on lengths, which would compile it again.
    if in_graph or not documents.are_even or documents.lengths[0] % PLANNED_TOKENS:
        features.append("documents of any length")
    if torch.are_deterministic_algorithms_enabled():
        features.append("the same bits each time")
    widths = (query.shape[2], value.shape[2])
    name = _kernel_name(query.device, query.dtype, widths, tuple(features), in_graph)
    return KERNELS[name].compute(query, key, value, documents, options)


def prepare(documents: PackedDocuments, windows: Iterable[int | None]) -> None:
    """Compute what attention reads in compiled layers, whose windows have these sizes."""
    # Batches have other numbers of documents, for which nothing need be compiled again.
    torch._dynamo.maybe_mark_dynamic(documents.boundaries, 0)
    if "flex" in of_device(documents.device).attention:
        for window_tokens in windows:
            _ = documents.visible(window_tokens).block_mask


@torch.compiler.assume_constant_result  # of constants: compiled code holds the chosen kernel alone
def _kernel_name(
    device: torch.device, dtype: torch.dtype, widths: tuple[int, int], features: tuple[Feature, ...], in_graph: bool
) -> str:
    kind = of_device(device)
    request = Request(kind.name, capability_of(device), dtype, *widths, frozenset(features), in_graph)
    return choose(request, kind.attention, os.environ.get(SWITCH))


@lru_cache(maxsize=256)
def choose(request: Request, names: tuple[str, ...], preferred: str | None = None) -> str:
    """Return the name of the first kernel that can compute the attention, `preferred` before the device's `names`.

    Raises ModelError, with each kernel's reasons, if none can.
    """
    # The switch is for devices that have kernels to choose from: others keep their own.
    extra = (preferred,) if preferred in KERNELS and "flash" in names else ()
    refusals = {}
    for name in (*extra, *names):
        refusals[name] = list(KERNELS[name].problems(request))
        if not refusals[name]:
            return name
    why = "; ".join(f"{name} {', '.join(problems)}" for name, problems in refusals.items())
    old = request.dtype == torch.bfloat16 and (request.capability or (8, 0)) < (8, 0)
    remedy = (
        "say `precision: fp32`, or take a newer GPU (Ampere or later)"
        if old
        else "train on a CPU, or change what the kernels lack in the model's config.json, such as `attention_dropout`"
    )
    raise ModelError(
        f"computing attention on {request.device}: no kernel can, but torch's slow one, which holds all pairs of "
        f"positions in memory ({why}); {remedy}"
    )


def _flash(query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments, options: AttentionOptions) -> Tensor:
    boundaries, longest = documents.boundaries, documents.longest
    # -1: no limit. A window counts the token itself, `varlen_attn` only those before it.
    tokens_before = -1 if options.window_tokens is None else options.window_tokens - 1
    grouped: dict[str, Any] = {"enable_gqa": True}
    if not GROUPS_QUERIES:
        grouped = {}
        key, value = (_expanded(states, query.shape[1], 1) for states in (key, value))
    return varlen_attn(
        query,
        key,
        value,
        boundaries,
        boundaries,
        longest,
        longest,
        scale=options.scaling,
        window_size=(tokens_before, 0),  # 0 tokens after: causal
        **grouped,
    )


def _expanded(states: Tensor, num_heads: int, dim: int) -> Tensor:
    """Copy each key or value head for the consecutive query heads that share it; heads are in dimension `dim`."""
    copies = num_heads // states.shape[dim]
    if copies == 1:
        return states
    shape = (-1,) * (dim + 1) + (copies,) + (-1,) * (states.ndim - dim - 1)
    return states.unsqueeze(dim + 1).expand(shape).flatten(dim, dim + 1)


def _flex(query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments, options: AttentionOptions) -> Tensor:
    visible = documents.visible(options.window_tokens)
    softcap = options.softcap

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    # [tokens, heads, width] → [1, heads, tokens, width]
    attention = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    output, auxiliary = attention(
        *(states.transpose(0, 1).unsqueeze(0) for states in (query, key, value)),
        score_mod=None if softcap is None else capped,
        block_mask=visible.block_mask,
        scale=options.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=options.sinks is not None),
    )
    if options.sinks is not None:
        # A sink adds exp(sink) to the sum of exponentials by which all are divided; it has no value to add.
        shares = torch.sigmoid(auxiliary.lse - options.sinks.float()[:, None])  # [1, heads, tokens]
        output = output * shares.to(output.dtype).unsqueeze(3)
    return output.squeeze(0).transpose(0, 1)


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _padded(query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments, options: AttentionOptions) -> Tensor:
    if torch.compiler.is_compiling():
        assert documents.queries is None, "only the layers of an engine without context parallelism are compiled"
        arguments = (query, key, value, documents.boundaries, documents.blocks, options.sinks)
        changes = (options.scaling, options.dropout, options.window_tokens, options.softcap)
        return torch.ops.lifecycle.padded_attention(*arguments, *changes)[0]
    if documents.queries is None:
        return _in_buckets(query, key, value, documents, options, attention=_padded_attention)
    # Queries of this process alone, keys of all: one mask of all pairs.
    mask = documents.visible(options.window_tokens).mask
    # [tokens, heads, width] → [1, heads, tokens, width]
    query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    return _padded_attention(query, key, value, options, mask).squeeze(0).transpose(0, 1)


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments, options: AttentionOptions
) -> Tensor:
    operation = torch.ops.aten._scaled_dot_product_efficient_attention
    return _in_buckets(query, key, value, documents, options, attention=_of_fused(operation))


def _cudnn(query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments, options: AttentionOptions) -> Tensor:
    operation = torch.ops.aten._scaled_dot_product_cudnn_attention
    return _in_buckets(query, key, value, documents, options, attention=_of_fused(operation))


@torch.library.custom_op("lifecycle::padded_attention", mutates_args=())
def _padded_operation(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    blocks: Tensor | None,
    sinks: Tensor | None,
    scaling: float | None,
    dropout: float,
    window_tokens: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Compute `_padded` as one operation of a compiled graph, which reads the documents' lengths when it runs.

    Returns the output and, for the backward pass, the seed of the dropout.
    """
    seed = torch.randint(2**62, ()) if dropout else torch.zeros((), dtype=torch.int64)
    options = AttentionOptions(scaling, dropout, window_tokens, softcap, sinks)
    output = _with_seed(seed, (query, key, value), _documents(boundaries, blocks), options)
    return output.contiguous(), seed  # as compiled code expects it of the function below


@_padded_operation.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(*query.shape[:2], value.shape[2]), torch.empty((), dtype=torch.int64)


@torch.library.custom_op("lifecycle::padded_attention_backward", mutates_args=())
def _padded_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    blocks: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor,
    scaling: float | None,
    dropout: float,
    window_tokens: int | None,
    softcap: float | None,
) -> list[Tensor]:
    """Return the gradients of queries, keys, values and sinks, if there are any; the attention is computed again.

    An operation keeps tensors for its backward pass, but no graph of autograd.
    """
    inputs = [one.detach().requires_grad_() for one in (query, key, value, sinks) if one is not None]
    options = AttentionOptions(scaling, dropout, window_tokens, softcap, None if sinks is None else inputs[3])
    # Inside of an operation torch dispatches below autograd, and does not record.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.enable_grad():
        output = _with_seed(seed, (inputs[0], inputs[1], inputs[2]), _documents(boundaries, blocks), options)
        return [one.contiguous() for one in torch.autograd.grad(output, inputs, gradient)]


@_padded_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> list[Tensor]:
    return [one.new_empty(one.shape) for one in (query, key, value, rest[2]) if one is not None]


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], output[1])
    ctx.options = inputs[6:]


def _backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    of_states = torch.ops.lifecycle.padded_attention_backward(gradient, *ctx.saved_tensors, *ctx.options)
    of_sinks = of_states[3] if len(of_states) > 3 else None
    return *of_states[:3], None, None, of_sinks, *[None] * len(ctx.options)


_padded_operation.register_autograd(_backward, setup_context=_keep_for_backward)


def _with_seed(
    seed: Tensor, states: tuple[Tensor, Tensor, Tensor], documents: PackedDocuments, options: AttentionOptions
) -> Tensor:
    """Compute `_padded`, with the dropout of a seed."""
    if not options.dropout:
        return _padded(*states, documents, options)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(int(seed))
        return _padded(*states, documents, options)


def _documents(boundaries: Tensor, blocks: Tensor | None) -> PackedDocuments:
    lengths = tuple(boundaries.diff().tolist())
    if blocks is not None:
        return PackedDocuments(lengths, boundaries.device, blocks=blocks)
    return _documents_of_lengths(lengths, boundaries.device)


@lru_cache(maxsize=4)  # all layers ask for the same
def _documents_of_lengths(lengths: tuple[int, ...], device: torch.device) -> PackedDocuments:
    return PackedDocuments(lengths, device)


PaddedAttention = Callable[[Tensor, Tensor, Tensor, AttentionOptions, Tensor | None], Tensor]
"""Type of a function of queries, keys and values [documents, heads, length, width], options and a mask."""


def _of_fused(operation: Callable[..., Any]) -> PaddedAttention:
    """Return attention by one of torch's fused operations, asked for by name: SDPA might choose another."""

    def attention(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, mask: Tensor | None) -> Tensor:
        key, value = (_expanded(states, query.shape[1], 1) for states in (key, value))
        # No bias; the log-sum-exp, which the backward pass needs.
        arguments = (query, key, value, None, True, options.dropout)
        return operation(*arguments, is_causal=True, scale=options.scaling)[0]

    return attention


def _in_buckets(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: PackedDocuments,
    options: AttentionOptions,
    *,
    attention: PaddedAttention,
) -> Tensor:
    """Compute attention over documents padded in buckets of similar length; tensors are [tokens, heads, width].

    Padding follows its document, so causal attention never sees it.
    """
    padded = [pad_documents(tokens, documents) for tokens in (query, key, value)]
    outputs = []
    for bucket in documents.buckets:
        # [slots, heads, width] → [documents, heads, length, width]
        queries, keys, values = (
            states[bucket.start : bucket.end].unflatten(0, (bucket.num_documents, bucket.length)).transpose(1, 2)
            for states in padded
        )
        mask = None
        if documents.blocks is not None:
            mask = documents.padded_mask(bucket, options.window_tokens).unsqueeze(1)  # the same for all heads
        # and back: [slots, heads, width]
        outputs.append(attention(queries, keys, values, options, mask).transpose(1, 2).flatten(0, 1))
    return unpad_documents(torch.cat(outputs) if len(outputs) > 1 else outputs[0], documents)


def _padded_attention(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, mask: Tensor | None
) -> Tensor:
    """Compute attention of documents padded to one length by torch's SDPA.

    mask: bool, broadcast to [documents, heads, queries, keys]: True where a query sees a key; None: causal, in the
    window.
    """
    length, window = query.shape[2], options.window_tokens
    if options.softcap is not None or options.sinks is not None:
        mask = _causal_mask(length, window or length, query.device) if mask is None else mask
        return _explicit_attention(query, key, value, options, mask)
    # A window at least as long as the documents hides nothing: without a mask a fused causal kernel may run.
    if mask is None and window is not None and window < length:
        mask = _causal_mask(length, window, query.device)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=options.dropout,
        is_causal=mask is None,
        scale=options.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _explicit_attention(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, mask: Tensor) -> Tensor:
    """Compute attention of soft-capped scores or with sinks, for which SDPA has no argument, step by step."""
    num_documents, num_heads, length, width = query.shape
    key, value = (_expanded(states, num_heads, 1) for states in (key, value))
    # [documents, heads, queries, keys]
    scores = query @ key.transpose(2, 3) * (width**-0.5 if options.scaling is None else options.scaling)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    # After the soft cap, which would turn -inf into -softcap.
    scores = scores.masked_fill(~mask, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype).view(1, num_heads, 1, 1).expand(num_documents, -1, length, 1)
        scores = torch.cat([scores, sinks], dim=3)  # [documents, heads, queries, keys + 1]
    # A sink's column takes its share of the weights, then is cut off: it has no value to add.
    weights = scores.softmax(dim=3, dtype=torch.float32)[..., : key.shape[2]].to(query.dtype)
    return functional.dropout(weights, options.dropout) @ value


def _causal_mask(length: int, window_tokens: int, device: torch.device) -> Tensor:
    """Return the causal mask, bool [length, length]: True where the row's token may see the column's token."""
    # window_tokens 2: each row is True at its own column and the one before
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window_tokens)


_AMPERE, _HOPPER = (8, 0), (9, 0)
_HALF = {torch.bfloat16: _AMPERE, torch.float16: _AMPERE}
_USUAL: frozenset[Feature] = frozenset({"documents of any length", "the same bits each time"})
_ANY: frozenset[Feature] = _USUAL | {"sliding window", "soft cap", "sinks", "blocks", "context parallelism"}
KERNELS = {
    "cudnn": Kernel(
        _cudnn,
        frozenset(),
        dict.fromkeys(_HALF, _HOPPER),
        widest_head=128,
        has_one_width=True,
        aligned_bytes=16,
        has_fixed_shapes=False,
    ),
    "flash": Kernel(_flash, _USUAL | {"sliding window"}, _HALF, widest_head=256, has_one_width=True, aligned_bytes=16),
    "efficient": Kernel(
        _efficient,
        _USUAL | {"dropout"},
        {**_HALF, torch.float32: (5, 0)},
        aligned_bytes=16,
        has_fixed_shapes=False,
    ),
    "flex": Kernel(_flex, _ANY, {**_HALF, torch.float32: (7, 0)}),
    "padded": Kernel(_padded, _ANY | {"dropout"}),
}
"""Attention kernels by name."""
