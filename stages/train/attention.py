"""Attention over packed rows in which no document sees another, without a mask of the row's size.

`prepare_attention` tells with which `attn_implementation` a model is to be built; `attention_arguments` gives the
keyword arguments that its forward then needs for a batch:

    "packed_documents"   ours, registered with Transformers' attention interface: every document of a micro-batch is
                         attended to on its own, from their lengths alone. For every model whose attention is plain
                         causal attention (also grouped-query) through that interface.
    "sdpa", "eager"      Transformers' own, with the block mask that it derives from position ids that restart at
                         each document: right for sliding windows, attention sinks and soft-capped scores too, at the
                         price of a mask of rows × sequence².

`packed_documents` has two kernels: flash attention over variable lengths on a GPU in half precision
(`torch.nn.attention.varlen`), and elsewhere causal SDPA over documents padded to the longest of their bucket.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface

from stages.errors import ModelError
from stages.train.data.batch import Batch
from stages.train.documents import PackedDocuments

PACKED_DOCUMENTS = "packed_documents"

CAUSAL_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types (in Transformers' words) that keep nothing from token to token but keys and values."""

UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "position_bias")
"""Arguments that change what attention computes, in ways that `packed_documents` does not know."""


def prepare_attention(model_config: Any, device: torch.device) -> str:
    """The `attn_implementation` to build a model of this Transformers config with, registered and ready.

    Raises `ModelError` for a model that keeps a state from token to token (Mamba and the like): nothing would keep the
    documents of a packed row apart in it.
    """
    model_class = _model_class(model_config)
    layer_types = set(getattr(model_config, "layer_types", None) or ["full_attention"])
    if getattr(model_class, "_is_stateful", False) or layer_types - CAUSAL_LAYERS:
        raise ModelError(
            f"choosing the attention of a {model_config.model_type} model: it has layers that keep a state from token "
            f"to token ({', '.join(sorted(layer_types))}), so documents packed into one row would see each other; "
            "only models that attend to tokens alone can be trained on packed rows"
        )
    if _is_plain_causal(model_config, model_class):
        AttentionInterface.register(PACKED_DOCUMENTS, packed_attention)
        return PACKED_DOCUMENTS
    softcapped = getattr(model_config, "attn_logit_softcapping", None)
    return "sdpa" if getattr(model_class, "_supports_sdpa", False) and not softcapped else "eager"


def attention_arguments(batch: Batch, attn_implementation: str) -> dict[str, Any]:
    """Keyword arguments for the forward of a model built with `attn_implementation`, beside `input_ids`."""
    arguments = {"position_ids": batch.position_ids, "use_cache": False}
    if attn_implementation == PACKED_DOCUMENTS:
        arguments["documents"] = PackedDocuments(batch.document_lengths, batch.input_ids.device)
    return arguments


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    documents: PackedDocuments,
    scaling: float | None = None,
    dropout: float = 0.0,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document, as Transformers' attention interface has it.

    `query` is [rows, heads, sequence, head_dim], `key` and `value` [rows, key_value_heads, sequence, head_dim]; the
    result [rows, sequence, heads, head_dim]. Raises `ModelError` when the model asks for more than that.
    """
    _refuse_more_than_causal(module, documents, arguments)
    queries, keys, values = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    if _has_flash_kernel(queries, values) and not dropout:
        output = _flash_attention(queries, keys, values, documents, scaling)
    else:
        output = _bucketed_attention(queries, keys, values, documents, scaling, dropout)
    return output.unflatten(0, (query.shape[0], query.shape[2])), None


def _has_flash_kernel(query: Tensor, value: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[2] == value.shape[2] <= 256


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments, scaling: float | None
) -> Tensor:
    """Tensors are [tokens, heads, head_dim]."""
    from torch.nn.attention.varlen import varlen_attn  # not in every build of torch

    boundaries, longest = documents.boundaries, documents.longest
    return varlen_attn(
        query, key, value, boundaries, boundaries, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=True
    )


def _bucketed_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments, scaling: float | None, dropout: float
) -> Tensor:
    """Tensors are [tokens, heads, head_dim]. Padding follows its document, so causal attention never sees it."""
    padded = [_Pad.apply(tokens, documents.slots, documents.num_slots) for tokens in (query, key, value)]
    outputs = []
    for bucket in documents.buckets:
        inputs = [
            states[bucket.start : bucket.end].unflatten(0, (bucket.num_documents, bucket.length)).transpose(1, 2)
            for states in padded
        ]
        output = functional.scaled_dot_product_attention(
            *inputs, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return _Unpad.apply(torch.cat(outputs), documents.slots)


class _Pad(torch.autograd.Function):
    """Put every token into its slot, zeros elsewhere. (Plain indexing would sum its gradients one by one.)"""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, slots: Tensor, num_slots: int) -> Tensor:
        ctx.save_for_backward(slots)
        return tokens.new_zeros(num_slots, *tokens.shape[1:]).index_copy_(0, slots, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, *ctx.saved_tensors), None, None


class _Unpad(torch.autograd.Function):
    """Take every token from its slot: the inverse of `_Pad`."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.num_slots = len(padded)
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0]
        padded = gradient.new_zeros(ctx.num_slots, *gradient.shape[1:])
        return padded.index_copy_(0, *ctx.saved_tensors, gradient), None


def _model_class(model_config: Any) -> type | None:
    """The causal language model of this config; None for code that came with the model."""
    if type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]


def _is_plain_causal(model_config: Any, model_class: type | None) -> bool:
    layer_types = set(getattr(model_config, "layer_types", None) or ["full_attention"])
    has_window = getattr(model_config, "sliding_window", None) and getattr(model_config, "use_sliding_window", True)
    return (
        getattr(model_class, "_supports_attention_backend", False)
        and layer_types == {"full_attention"}
        and not (has_window and not hasattr(model_config, "layer_types"))
        and not getattr(model_config, "attn_logit_softcapping", None)
        and not getattr(model_config, "attention_chunk_size", None)
    )


def _refuse_more_than_causal(module: nn.Module, documents: PackedDocuments, arguments: dict[str, Any]) -> None:
    asked = [name for name in UNSUPPORTED_ARGUMENTS if arguments.get(name) is not None]
    window = arguments.get("sliding_window")
    if window is not None and window < documents.longest:
        asked.append(f"sliding_window {window}")
    if asked:
        raise ModelError(
            f"attention of {type(module).__name__}: it asks for {', '.join(asked)}, which {PACKED_DOCUMENTS} does not "
            "compute; its model has to be built with Transformers' own attention"
        )
