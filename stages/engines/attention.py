"""Attention over packed rows in which no document attends to another, without a sequence × sequence mask.

`hidden_states` runs a model's decoder over a batch of packed documents. There are two ways, of which `fsdp/probe.py`
chooses one by trying them:

- `packed_documents`, registered with Transformers' attention interface: attention within each document of a
  micro-batch, from their lengths alone. For every architecture whose attention goes through that interface, with
  grouped queries, sliding windows, soft-capped scores and attention sinks.
- For all others (recurrent states, position biases, code that came with the model) documents become rows of their own,
  padded at the end to the longest: right for any causal model, and wasteful where lengths are uneven. Transformers'
  own packing, by position ids that restart at 0, was tried and does not work: some of its architectures (gpt-oss,
  AFMoE, BLOOM, BioGPT in 5.17) silently ignore it.

`packed_documents` has two kernels: flash attention over variable lengths on a GPU in half precision
(`torch.nn.attention.varlen`), and elsewhere causal SDPA over documents padded to the longest of their bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from stages.core.errors import ModelError
from stages.data.batch import ModelInputs
from stages.engines.documents import PackedDocuments, pad_documents, unpad_documents
from stages.parallel.accelerator import of_device

PACKED_DOCUMENTS = "packed_documents"

FLASH_HEAD_WIDTH = 256


def register_packed_attention() -> None:
    """Make `packed_documents` an `attn_implementation` that Transformers knows."""
    AttentionInterface.register(PACKED_DOCUMENTS, packed_attention)


def hidden_states(decoder: Any, inputs: ModelInputs) -> Tensor:
    """Return the last hidden states [rows, sequence, width] of a headless model, each document by itself.

    `decoder` was built with the `attn_implementation` that the probe chose.
    """
    output, in_rows = _run(decoder, inputs)
    return in_rows(output[0])


def hidden_states_and_router_logits(decoder: Any, inputs: ModelInputs) -> tuple[Tensor, list[Tensor]]:
    """Return last hidden states and each mixture layer's router logits [rows, sequence, experts]."""
    output, in_rows = _run(decoder, inputs, output_router_logits=True)
    return in_rows(output[0]), [in_rows(logits) for logits in output.router_logits]


def _run(decoder: Any, inputs: ModelInputs, **options: Any) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """Run the decoder on a batch; return its output, and a function that reshapes its states to the batch's rows."""
    device, shape = inputs.input_ids.device, inputs.input_ids.shape
    options["use_cache"] = False
    if decoder.config._attn_implementation == PACKED_DOCUMENTS:
        options["documents"] = PackedDocuments(inputs.documents.lengths, device)
        output = decoder(input_ids=inputs.input_ids, position_ids=inputs.position_ids, **options)
        return output, lambda states: states.reshape(*shape, -1)
    documents = PackedDocuments(inputs.documents.lengths, device, least_fill=0)
    # `least_fill=0` makes one bucket: the padded positions are then a matrix with a row for each document.
    rows = pad_documents(inputs.input_ids.flatten(), documents).view(-1, documents.longest)  # [documents, longest]
    output = decoder(input_ids=rows, **options)
    return output, lambda states: unpad_documents(states.reshape(rows.numel(), -1), documents).view(*shape, -1)


@dataclass(frozen=True)
class AttentionOptions:
    """Options by which architectures change attention: scale, dropout, sliding window, soft cap and sinks."""

    scaling: float | None
    dropout: float
    window_tokens: int | None
    """Size of the sliding attention window in tokens, the token itself included; None: no window."""
    softcap: float | None
    """Soft cap of attention scores, which become softcap × tanh(score / softcap) (Gemma 2)."""
    sinks: Tensor | None
    """Attention sinks [heads]: scores of an absent token, which takes a share of the attention weights (gpt-oss)."""


@torch.compiler.disable  # the lengths differ from batch to batch: compiled, every batch would be compiled again
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    documents: PackedDocuments | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each packed document; called by Transformers' attention interface.

    `query` is [rows, heads, sequence, head_width], `key` and `value` have key_value_heads; the result is [rows,
    sequence, heads, head_width]. Raises ModelError when the model asks for something else.
    """
    if documents is None or position_bias is not None:
        missing = "does not pass on where documents end" if documents is None else "adds a bias to its scores"
        raise ModelError(f"{type(module).__name__} {missing}: this architecture cannot be trained on packed documents")
    scoring = AttentionOptions(scaling, dropout, sliding_window, softcap, s_aux)
    # [rows, heads, sequence, head_width] → [rows × sequence, heads, head_width]
    queries, keys, values = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    attend = _flash_attention if _has_flash_kernel(queries, values, scoring) else _bucketed_attention
    output = attend(queries, keys, values, documents, scoring)
    return output.unflatten(0, (query.shape[0], query.shape[2])), None


def _has_flash_kernel(query: Tensor, value: Tensor, scoring: AttentionOptions) -> bool:
    half_on_gpu = of_device(query.device).has_flash_kernel and query.dtype in (torch.bfloat16, torch.float16)
    plain = not scoring.dropout and scoring.softcap is None and scoring.sinks is None
    return half_on_gpu and plain and query.shape[2] == value.shape[2] <= FLASH_HEAD_WIDTH


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments, scoring: AttentionOptions
) -> Tensor:
    """Compute attention over packed documents by flash kernels; tensors are [tokens, heads, head_width]."""
    boundaries, longest = documents.boundaries, documents.longest
    # -1: no limit. A window counts the token itself, `varlen_attn` only those before it.
    tokens_before = -1 if scoring.window_tokens is None else scoring.window_tokens - 1
    grouped: dict[str, Any] = {"enable_gqa": True}
    if not _takes_grouped_queries(varlen_attn):  # torch before 2.13: a copy of keys and values for each query's head
        grouped = {}
        key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], 1) for states in (key, value))
    return varlen_attn(
        query,
        key,
        value,
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scoring.scaling,
        window_size=(tokens_before, 0),  # 0 tokens after: causal
        **grouped,
    )


@cache
def _takes_grouped_queries(attention: Callable[..., Any]) -> bool:
    return "enable_gqa" in signature(attention).parameters


def _bucketed_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments, scoring: AttentionOptions
) -> Tensor:
    """Compute attention by torch's SDPA, over documents padded in buckets of similar length.

    Tensors are [tokens, heads, head_width]. Padding follows its document, so causal attention never sees it.
    """
    padded = [pad_documents(tokens, documents) for tokens in (query, key, value)]
    outputs = []
    for bucket in documents.buckets:
        # [slots, heads, head_width] → [documents, heads, length, head_width]
        queries, keys, values = (
            states[bucket.start : bucket.end].unflatten(0, (bucket.num_documents, bucket.length)).transpose(1, 2)
            for states in padded
        )
        # and back: [slots, heads, head_width]
        outputs.append(_padded_attention(queries, keys, values, scoring).transpose(1, 2).flatten(0, 1))
    return unpad_documents(torch.cat(outputs), documents)


def _padded_attention(query: Tensor, key: Tensor, value: Tensor, scoring: AttentionOptions) -> Tensor:
    """Compute attention of documents padded to one length; tensors are [documents, heads, length, head_width]."""
    length, window = query.shape[2], scoring.window_tokens
    if scoring.softcap is not None or scoring.sinks is not None:
        return _explicit_attention(query, key, value, scoring)
    # A window at least as long as the documents hides nothing: without a mask a fused causal kernel may run.
    mask = None if window is None or window >= length else _causal_mask(length, window, query.device)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=scoring.dropout,
        is_causal=mask is None,
        scale=scoring.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _explicit_attention(query: Tensor, key: Tensor, value: Tensor, scoring: AttentionOptions) -> Tensor:
    """Compute attention of soft-capped scores or with sinks, which no fused kernel in torch supports, step by step."""
    num_documents, num_heads, length, width = query.shape
    # Grouped queries: consecutive query heads share the key and value head that is repeated for them.
    key, value = (states.repeat_interleave(num_heads // key.shape[1], dim=1) for states in (key, value))
    # [documents, heads, length, length]: a row for each query, a column for each key
    scores = query @ key.transpose(2, 3) * (width**-0.5 if scoring.scaling is None else scoring.scaling)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    # After the soft cap, which would turn -inf into -softcap.
    scores = scores.masked_fill(~_causal_mask(length, scoring.window_tokens or length, query.device), -torch.inf)
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype).view(1, num_heads, 1, 1).expand(num_documents, -1, length, 1)
        scores = torch.cat([scores, sinks], dim=3)  # [documents, heads, length, length + 1]
    # A sink's column takes its share of the weights, then is cut off: it has no value to add.
    weights = scores.softmax(dim=3, dtype=torch.float32)[..., :length].to(query.dtype)
    return functional.dropout(weights, scoring.dropout) @ value


def _causal_mask(length: int, window_tokens: int, device: torch.device) -> Tensor:
    """Return the causal mask, bool [length, length]: True where the row's token may see the column's token."""
    # window_tokens 2: each row is True at its own column and the one before
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window_tokens)
