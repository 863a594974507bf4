"""Log-probabilities of target tokens from hidden states and output head, without the logits of a whole batch.

Only positions that have a target are sent through the head (which saves most of the vocabulary work of chats), and
their logits exist for one chunk of tokens at a time: at most `CHUNK_LOGITS` values. The forward pass holds two fp32
tensors of that size, the backward pass, which computes a chunk's logits again, three, and the head's gradient, in fp32
when there are several chunks, so that their sum does not lose the digits that bf16 lacks. With one chunk its
log-softmax is kept instead. (Liger's fused loss gives no log-probabilities of single tokens, which preference losses
need, and does the head's backward work before it knows the weight of each token.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stages.data.batch import IGNORED

CHUNK_LOGITS = 2**27
"""Number of logits in memory at a time (512 MiB in fp32): 884 tokens of a 152k vocabulary keep a large GPU busy."""

LogitsTransform = Callable[[Tensor], Tensor]
"""Element-wise function that a model applies to its fp32 logits, such as a soft cap or a scale."""


def token_log_probabilities(
    hidden: Tensor, head: nn.Module, wanted: Tensor, transform: LogitsTransform | None = None
) -> Tensor:
    """Return log-probabilities of given tokens at every position of a batch, 0 where none is given; differentiable.

    `hidden` is [rows, sequence, width], `wanted` int64 [rows, sequence] or [rows, sequence, number], IGNORED in the
    first place where a position has none; the result is float32 of the same shape. `head` has a `weight` [vocabulary,
    width] and perhaps a `bias`; both are read here, so under FSDP2 this belongs into the forward of the module that
    gathers them. `transform` maps fp32 logits to fp32 logits.
    """
    bias = getattr(head, "bias", None)
    several = wanted.reshape(wanted.shape[0] * wanted.shape[1], -1)  # [rows × sequence, number]
    positions = _positions(several[:, 0])
    selected = several.index_select(0, positions)  # [positions, number]
    flat_hidden = hidden.reshape(-1, hidden.shape[-1])  # [rows × sequence, width]
    result = _LogProbabilities.apply(flat_hidden, head.weight, bias, positions, selected, transform)
    return result.view(wanted.shape).clone()  # FSDP2 warns of a root module that returns a view


@torch.no_grad()
def greedy_tokens(hidden: Tensor, head: nn.Module, targets: Tensor) -> Tensor:
    """Return the likeliest token at every position that has a target, -100 elsewhere; int64 [rows, sequence].

    Arguments as in `token_log_probabilities`; transforms keep the order of logits, so none is needed.
    """
    bias = getattr(head, "bias", None)
    positions = _positions(targets)
    selected = hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions)  # [positions, width]
    tokens = torch.full((targets.numel(),), IGNORED, device=targets.device)
    for chunk in _chunks(len(positions), head.weight.shape[0]):
        tokens[positions[chunk]] = _head_output(selected[chunk], head.weight, bias).argmax(1)
    return tokens.view(targets.shape)


@torch.no_grad()
def likeliest_tokens(
    hidden: Tensor, head: nn.Module, targets: Tensor, number: int, transform: LogitsTransform | None = None
) -> Tensor:
    """Return the `number` likeliest tokens at every target and their log-probabilities, the likeliest first.

    float32 [rows, sequence, 2, number], which holds tokens exactly below 2^24; 0 elsewhere. Arguments:
    `token_log_probabilities`.
    """
    bias = getattr(head, "bias", None)
    positions = _positions(targets)
    selected = hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions)  # [positions, width]
    likeliest = torch.zeros(targets.numel(), 2, number, device=targets.device)
    for chunk in _chunks(len(positions), head.weight.shape[0]):
        # both [tokens of the chunk, number]
        values, tokens = _log_softmax(_head_output(selected[chunk], head.weight, bias), transform).topk(number)
        likeliest[positions[chunk]] = torch.stack([tokens.float(), values], 1)
    return likeliest.view(*targets.shape, 2, number)


def _positions(targets: Tensor) -> Tensor:
    """Return the positions that have a target, as indices of the flattened rows: int64 [positions]."""
    return (targets.reshape(-1) != IGNORED).nonzero().squeeze(1)


def logits_transform(model_config: Any) -> LogitsTransform | None:
    """Return a model's function of its head's logits, or None: soft cap (Gemma: cap × tanh(logits / cap)) or scale."""
    softcap = getattr(model_config, "final_logit_softcapping", None)
    if softcap:
        return lambda logits: torch.tanh(logits / softcap) * softcap
    scale = _logits_scale(model_config)
    return None if scale == 1.0 else lambda logits: logits * scale


def tempered(transform: LogitsTransform | None, temperature: float) -> LogitsTransform | None:
    """Return a function that applies the model's logits transform, then divides by the sampling temperature."""
    if temperature == 1:
        return transform
    return lambda logits: (transform(logits) if transform else logits) / temperature


def _logits_scale(model_config: Any) -> float:
    model_type = getattr(model_config, "model_type", "")
    if model_type.startswith("cohere"):
        return model_config.logit_scale
    if model_type.startswith("granite"):
        return 1.0 / model_config.logits_scaling
    if model_type == "falcon_h1":
        return model_config.lm_head_multiplier
    return 1.0


class _LogProbabilities(torch.autograd.Function):
    """Autograd function for log-probabilities of tokens at selected positions, computed in chunks of logits.

    `targets`: int64 [positions, number]. With z = transform(W h + b) and p = softmax(z), d log p[target] / dz =
    onehot(target) - p.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        positions: Tensor,
        targets: Tensor,
        transform: LogitsTransform | None,
    ) -> Tensor:
        selected = hidden.index_select(0, positions)
        values = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        chunks = _chunks(len(positions), weight.shape[0])
        for chunk in chunks:
            log_softmax = _log_softmax(_head_output(selected[chunk], weight, bias), transform)
            values[chunk] = log_softmax.gather(1, targets[chunk])  # [tokens of the chunk, number]
        # With a transform the backward pass needs the head's output, which the log-softmax does not give back.
        kept = log_softmax if len(chunks) == 1 and transform is None and any(ctx.needs_input_grad) else None
        ctx.save_for_backward(selected, weight, bias, positions, targets, kept)
        ctx.transform, ctx.chunks, ctx.num_tokens = transform, chunks, hidden.shape[0]
        # [rows × sequence, number]: 0 where there is no target
        return values.new_zeros(hidden.shape[0], targets.shape[1]).index_copy_(0, positions, values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        selected, weight, bias, positions, targets, kept = ctx.saved_tensors
        gradient = gradients[0].index_select(0, positions)  # [positions, number]
        sum_dtype = weight.dtype if len(ctx.chunks) <= 1 else torch.float32  # a sum of chunks in bf16 loses digits
        _, learns_weight, learns_bias, *_ = ctx.needs_input_grad
        weight_gradient = torch.zeros_like(weight, dtype=sum_dtype) if learns_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=sum_dtype) if learns_bias else None
        selected_gradient = torch.empty_like(selected)
        for chunk in ctx.chunks:
            output_gradient = _output_gradient(
                kept, selected[chunk], weight, bias, targets[chunk], gradient[chunk], ctx.transform
            )
            selected_gradient[chunk] = output_gradient @ weight
            if weight_gradient is not None:
                weight_gradient += output_gradient.T @ selected[chunk]
            if bias_gradient is not None:
                bias_gradient += output_gradient.sum(0)
        # Back to all positions; those without a target have a zero gradient.
        hidden_gradient = selected.new_zeros(ctx.num_tokens, selected.shape[1])
        hidden_gradient.index_copy_(0, positions, selected_gradient)
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(weight.dtype)
        if bias_gradient is not None:
            bias_gradient = bias_gradient.to(bias.dtype)
        # None: positions, targets and transform
        return hidden_gradient, weight_gradient, bias_gradient, None, None, None


def _head_output(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # The product is in the head's dtype, the softmax over it in fp32.
    return functional.linear(hidden, weight, bias).float()


def _log_softmax(output: Tensor, transform: LogitsTransform | None) -> Tensor:
    return (transform(output) if transform else output).log_softmax(1)


def _output_gradient(
    kept: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    gradient: Tensor,
    transform: LogitsTransform | None,
) -> Tensor:
    """Return the gradient of Σ gradient × log p[target] by the head's output, [tokens, vocabulary], in its dtype."""
    if kept is not None:
        return _softmax_gradient(kept, targets, gradient).to(weight.dtype)
    output = _head_output(hidden, weight, bias)
    if transform is None:
        return _softmax_gradient(output.log_softmax(1), targets, gradient).to(weight.dtype)
    # Backward runs without gradients; a graph of the transform alone gives its derivative.
    with torch.enable_grad():
        output.requires_grad_()
        logits = transform(output)
    logits_gradient = _softmax_gradient(logits.detach().log_softmax(1), targets, gradient)
    return torch.autograd.grad(logits, output, logits_gradient)[0].to(weight.dtype)


def _softmax_gradient(log_softmax: Tensor, targets: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient by logits, Σ gradient × (onehot(target) - softmax) over targets."""
    # softmax × -Σ gradient; below, each target's own gradient comes on top. A token that is wanted twice gets both.
    result = log_softmax.exp().mul_(-gradient.sum(1, keepdim=True))
    return result.scatter_add_(1, targets, gradient)


def _chunks(num_tokens: int, vocabulary: int) -> list[slice]:
    # At least one token, though its vocabulary alone exceed the limit.
    tokens_per_chunk = max(1, CHUNK_LOGITS // vocabulary)
    return [slice(start, start + tokens_per_chunk) for start in range(0, num_tokens, tokens_per_chunk)]
