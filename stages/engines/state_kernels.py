"""Kernels of flash-linear-attention for mixers, which take the boundaries of packed documents: one pass, no padding.

Transformers' mixers call a short convolution and the gated delta rule by the names of functions in their module. Here
the same forward pass gets others of the same arguments. They are those of the installed package: none are fetched.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from stages.engines.documents import PackedDocuments
from stages.models.device_kernels import has_kernels, keep_models_of_transformers

CONVOLUTION, DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
"""Names of the functions by which Transformers' mixers with a gated delta rule see other tokens."""

Kernel = Callable[..., tuple[Tensor, Tensor | None]]


@cache
def installed(device: torch.device) -> tuple[Kernel, Kernel] | None:
    """Return the kernels of a short convolution and of the gated delta rule, if a device can run them."""
    if not has_kernels(device):
        return None
    keep_models_of_transformers()
    try:
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    return causal_conv1d, chunk_gated_delta_rule


def by_boundaries(forward: Callable[..., Any], documents: PackedDocuments) -> Callable[..., Any] | None:
    """Return a mixer's forward pass of one row of documents, [1, tokens, width]; None where no kernels are for it."""
    kernels = installed(documents.device)
    plain = inspect.unwrap(getattr(forward, "__func__", forward))
    if kernels is None or not {CONVOLUTION, DELTA_RULE} <= {*getattr(plain, "__code__", plain).co_names}:
        return None
    boundaries = documents.boundaries.long()
    functions = {
        CONVOLUTION: partial(_convolve, kernels[0], boundaries),
        DELTA_RULE: partial(_delta_rule, kernels[1], boundaries),
    }
    # A function of its own: what others call in Transformers' module stays as it is.
    bound = FunctionType(plain.__code__, {**plain.__globals__, **functions}, plain.__name__, plain.__defaults__)
    bound.__kwdefaults__ = plain.__kwdefaults__
    return partial(bound, forward.__self__)  # type: ignore[attr-defined]


def _convolve(
    kernel: Kernel,
    boundaries: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    **unused: Any,
) -> Tensor:
    """Return states [1, channels, tokens] convolved with weights [channels, width]; kernels take tokens first."""
    tokens = states.transpose(1, 2).to(weight.dtype)
    mixed, _ = kernel(tokens, weight, bias, activation=activation, cu_seqlens=boundaries)
    return mixed.transpose(1, 2).to(states.dtype)


def _delta_rule(
    kernel: Kernel, boundaries: Tensor, query: Tensor, key: Tensor, value: Tensor, **given: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the gated delta rule's output, [1, tokens, heads, width], as the queries, keys and values are."""
    if (group := value.shape[2] // query.shape[2]) > 1:  # up to 5.17, Transformers repeats them itself
        query, key = (heads.repeat_interleave(group, dim=2) for heads in (query, key))
    wanted = {name: given[name] for name in ("g", "beta", "use_qk_l2norm_in_kernel")}
    return kernel(query, key, value, **wanted, cu_seqlens=boundaries)
