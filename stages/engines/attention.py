"""Attention over packed rows in which no document attends to another, without a sequence × sequence mask.

`hidden_states` runs a model's decoder over a batch of packed documents. There are two ways, of which `fsdp/probe.py`
chooses one by trying them:

- `packed_documents`, registered with Transformers' attention interface: attention within each document of a
  micro-batch, from their lengths alone. For every architecture whose attention goes through that interface, with
  grouped queries, sliding windows, soft-capped scores and attention sinks. `mixers.py` runs modules with a state.
- For all others (position biases, chunks, code that came with the model) documents become rows of their own,
  padded at the end to the longest: right for any causal model, and wasteful where lengths are uneven. Transformers'
  own packing, by position ids that restart at 0, was tried and does not work: some of its architectures (gpt-oss,
  AFMoE, BLOOM, BioGPT in 5.17) silently ignore it.

The kernels of `packed_documents` are those of `attention_kernels.py`.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from stages.core.errors import ModelError
from stages.data.batch import ModelInputs
from stages.engines.attention_kernels import AttentionOptions, attend, prepare
from stages.engines.context import TokenSlice
from stages.engines.documents import PackedDocuments, pad_documents, unpad_documents
from stages.engines.media import Blocks, block_numbers, position_arguments
from stages.engines.mixers import mixing
from stages.engines.rotary import rotating_part

PACKED_DOCUMENTS = "packed_documents"


def register_packed_attention() -> None:
    """Make `packed_documents` an `attn_implementation` that Transformers knows."""
    AttentionInterface.register(PACKED_DOCUMENTS, packed_attention)


def hidden_states(
    decoder: Any,
    inputs: ModelInputs,
    *,
    is_compiled: bool = False,
    blocks: Blocks = None,
    part: TokenSlice | None = None,
) -> Tensor:
    """Return the last hidden states [rows, sequence, width] of a headless model, each document by itself.

    `decoder` was built with the `attn_implementation` that the probe chose. is_compiled: its layers are. part: tokens
    of this process, [1, tokens, width], where others compute the rest.
    """
    output, in_rows = _run(decoder, inputs, is_compiled, blocks, part)
    return in_rows(output[0])


def hidden_states_and_router_logits(
    decoder: Any,
    inputs: ModelInputs,
    *,
    is_compiled: bool = False,
    blocks: Blocks = None,
    part: TokenSlice | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return last hidden states and each mixture layer's router logits [rows, sequence, experts]."""
    output, in_rows = _run(decoder, inputs, is_compiled, blocks, part, output_router_logits=True)
    return in_rows(output[0]), [in_rows(logits) for logits in output.router_logits]


def rows_of_layers(decoder: Any, inputs: ModelInputs) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return functions that reshape a batch's values [rows, sequence, …] to rows as the decoder's layers see, and back.

    These are the batch's own, or one for each document, padded to the longest. Both functions are differentiable.
    """
    shape = inputs.input_ids.shape
    if decoder.config.get_text_config()._attn_implementation == PACKED_DOCUMENTS:
        return lambda values: values, lambda states: states.reshape(*shape, -1)
    # `least_fill=0` makes one bucket: the padded positions are then a matrix with a row for each document.
    documents = PackedDocuments(inputs.documents.lengths, inputs.input_ids.device, least_fill=0)
    size = (len(documents.lengths), documents.longest)
    # The longest document is the first row; pictures are in the order of the documents.
    row_of, document_of = documents.rows if inputs.media else (slice(None), slice(None))
    return (
        lambda values: pad_documents(values.flatten(0, 1), documents).unflatten(0, size)[row_of],
        lambda states: unpad_documents(states.reshape(*size, -1)[document_of].flatten(0, 1), documents).view(
            *shape, -1
        ),
    )


def _run(
    decoder: Any, inputs: ModelInputs, is_compiled: bool, blocks: Blocks, part: TokenSlice | None, **options: Any
) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """Run the decoder on a batch; return its output, and a function that reshapes its states to the batch's rows."""
    options["use_cache"] = False
    if part:
        own = part.of_inputs(inputs)
        options |= {"documents": part.documents, "position_ids": own.position_ids}
        with rotating_part(part.positions(inputs), slice(part.start, part.end)):
            output = decoder(input_ids=own.input_ids, **options)
        return output, lambda states: states.reshape(1, part.size, -1)
    device, shape = inputs.input_ids.device, inputs.input_ids.shape
    text = decoder.config.get_text_config()
    to_layers, to_batch = rows_of_layers(decoder, inputs)
    if inputs.media:
        options |= inputs.media.arguments
    if text._attn_implementation == PACKED_DOCUMENTS:
        # A document lies in one row, so that none is longer.
        longest = shape[1] if is_compiled else None
        documents = plain = PackedDocuments(inputs.documents.lengths, device, longest=longest)
        if inputs.media and inputs.media.runs and blocks:
            numbers = block_numbers(inputs.media, shape.numel())
            documents = PackedDocuments(inputs.documents.lengths, device, blocks=numbers, longest=longest)
            documents.in_full_layers = plain if blocks == "in windows" else None
        if is_compiled:
            prepare(documents, {None, getattr(text, "sliding_window", None)})
        options["documents"] = documents
        options |= position_arguments(decoder, inputs, to_layers)
        with mixing(documents):
            return decoder(input_ids=inputs.input_ids, **options), to_batch
    if inputs.media:
        options |= position_arguments(decoder, inputs, to_layers)
    return decoder(input_ids=to_layers(inputs.input_ids), **options), to_batch


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
    # [rows, heads, sequence, head_width] → [rows × sequence, heads, head_width]
    queries, keys, values = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    if sliding_window is None and documents.in_full_layers:
        documents = documents.in_full_layers
    options = AttentionOptions(scaling, dropout, sliding_window, softcap, s_aux)
    if documents.attend:
        output = documents.attend(queries, keys, values, options)
    else:
        output = attend(queries, keys, values, documents, options)
    return output.unflatten(0, (query.shape[0], query.shape[2])), None
