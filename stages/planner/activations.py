"""Predicted activation memory in bytes per token and process rank: kept for the backward pass, or used by one layer.

Equations 1 to 5 of Korthikanti et al. 2022 ("Reducing activation recomputation in large transformer models"), extended
to grouped queries, gated feed-forward layers and mixtures of experts. For that paper's GPT (s tokens, b rows, h wide, a
heads, t-way tensor parallelism) they give its s·b·h·(10 + 24/t + 5·a·s/(h·t)). A frozen matrix product keeps its input
only for an adapter, and a frozen norm keeps only its input.
"""

from dataclasses import replace
from functools import lru_cache

from stages.models.layer_kinds import LayerRole
from stages.models.shape import ModelShape
from stages.parallel.layout import Layout
from stages.planner.adapted import adapted_layers, dispatched_share, input_shares, merged_experts, stacked_ranks
from stages.planner.costs import StepCase
from stages.planner.walked import (
    kept_in_layer,
    kept_results,
    largest_for_a_moment,
    recomputed_share,
    widest_products,
)
from stages.planner.workload import ProgramTraits, Workload

DECODED_WEIGHTS, DECODING_BYTES = 2**22, 8
"""Number of weights decoded at a time from 4 or 8 bits, and temporary bytes of each; see `stages.adapters.quantized`.
"""


def kept_bytes_per_token(case: StepCase) -> float:
    """Return activation bytes per token that a layer keeps for backward, on one rank (products in fp8: fp8 inputs)."""
    shape, layout, workload, software = case.shape, case.layout, case.workload, case.software
    size, hidden = workload.compute_bytes, shape.hidden_size
    along_sequence = layout.tp if layout.sequence_parallel else 1
    checkpoint = hidden * size / (layout.tp if software.shards_checkpoints else along_sequence)
    # Each recomputed layer keeps its input only.
    if layout.recompute == "full":
        rest = 1 - software.recomputed_share
        kept = kept_bytes_per_token(_without_recomputation(case)) if rest else 0.0
        return software.recomputed_share * checkpoint + rest * kept
    if layout.recompute == "selective" and case.engine.keeps_products:
        products = size * _kept_results(shape, layout, software)
        return checkpoint + products + _adapters_per_token(case, keeps_results=True)
    if shape.kinds:
        return kept_in_layer(shape, workload, software, layout.tp, along_sequence) + _adapters_per_token(case)
    casts = workload.in_few_bits and software.casts_at_products
    into_products = 1 if workload.in_few_bits and not casts else size
    # torchao keeps what gradients of weights need, of frozen weights, too
    inputs = dict.fromkeys(LayerRole, 1.0) if casts else _kept_inputs(shape, workload)
    of_norm = _norm_bytes(case)
    # Bytes per token that tensor parallelism does not divide (unless along the sequence): two norms and the inputs of
    # products.
    of_products = hidden * into_products * (inputs[LayerRole.INTO_ATTENTION] + inputs[LayerRole.INTO_FFN])
    # An adapter keeps all tokens of its input.
    whole = of_products if workload.adapter and case.engine.splits_by_plan else 0.0
    unsplit = 2 * hidden * of_norm + of_products - whole
    # Two dropout masks of one byte.
    unsplit += 2 * hidden if software.dropout else 0
    split = _ffn_bytes_per_token(shape, size, into_products, inputs[LayerRole.OUT_OF_FFN], software)
    # Where every rank has a part of each expert, each has all tokens that are sent to them.
    dispatched = _dispatched_bytes(shape, size, workload)
    unsplit, split = (unsplit + dispatched, split) if case.engine.splits_by_plan else (unsplit, split + dispatched)
    unsplit += 2 * size * shape.latent_width  # as they come, and as the next products have them
    # Fused attention keeps queries and its output, keys and values, and the rotary part of queries and keys.
    split += 2 * size * (shape.query_width + shape.kv_width + shape.rotary_width)
    # The output projection's input once more, in 8 bits.
    split += shape.query_width * inputs[LayerRole.OUT_OF_ATTENTION] if workload.in_few_bits and not casts else 0
    split += of_norm * (shape.query_width + shape.kv_width) if shape.qk_norm else 0
    if not software.flash_attention and not layout.recomputes:
        # Korthikanti et al. 2022: 2 bytes of softmax for each score; dropout adds a mask of one byte and its 2-byte
        # output.
        split += shape.num_heads * workload.sequence_length * (5 if software.dropout else 2)
    return whole + unsplit / along_sequence + split / layout.tp + _adapters_per_token(case)


def kept_by_layer(case: StepCase) -> float:
    """Return the bytes of activations that a layer keeps on the device for the backward pass of a micro-batch."""
    per_layer = case.tokens * kept_bytes_per_token(case)
    if not case.layout.recomputes:
        per_layer += merged_experts_bytes(case)
    return per_layer * (1 - case.software.offloaded_share)


def head_inputs_per_token(case: StepCase) -> float:
    """Return the bytes per token of the last norm's input, the head's input, and both gradients of it."""
    size = case.workload.compute_bytes
    return case.shape.hidden_size * (_norm_bytes(case) + 3 * size)


def workspace_per_token(case: StepCase) -> float:
    """Return the temporary bytes per token of a layer's backward pass: recomputed activations, widest gradients."""
    beyond = _recomputed_bytes_per_token(case) if case.layout.recomputes else 0.0
    gathered = 2 * case.shape.hidden_size
    if case.engine.splits_by_plan and case.layout.tp > 1 and not case.layout.sequence_parallel:
        # Gradients of one input by two matrices, each as computed and as summed over processes, until they are added.
        gathered += 3 * case.shape.hidden_size
    widest = (2 if case.shape.gated_ffn else 1) * _ffn_width(case.shape) / case.layout.tp
    size = case.workload.compute_bytes
    if case.shape.kinds:
        # A product of two tensors without weights, as of states and their inputs, has two gradients as large.
        for_a_moment = largest_for_a_moment(case.shape, size, case.layout.tp)
        widest = max(widest_products(case.shape, case.layout.tp), 2 * for_a_moment / size)
    return beyond + size * (gathered + widest)


def _recomputed_bytes_per_token(case: StepCase) -> float:
    """Return what the layer that runs backward holds for a moment beyond what every layer keeps."""
    every = case.software.recomputed_share == 1.0
    kept = kept_bytes_per_token(case if every else replace(case, software=replace(case.software, recomputed_share=1.0)))
    return max(0.0, kept_bytes_per_token(_without_recomputation(case)) - kept)


def _norm_bytes(case: StepCase) -> int:
    """Return the bytes that a norm keeps of each value.

    Fused, its input; eager, a copy in fp32 and, where its weight learns, another in the precision of training.
    """
    size = case.workload.compute_bytes
    if case.software.fused_elementwise:
        return size
    return 4 + (size if case.workload.adapter is None else 0)


def _without_recomputation(case: StepCase) -> StepCase:
    """Return the same training step with activation recomputation switched off."""
    return replace(case, layout=case.layout.model_copy(update={"recompute": "none"}))


def weight_workspace(shape: ModelShape, workload: Workload) -> float:
    """Return the temporary bytes of the largest linear weight when dequantized, or merged with its DoRA adapter."""
    adapter = workload.adapter
    linears = [one for layer in adapted_layers(shape, adapter) for one in layer] if adapter else []
    if adapter is None or not linears:
        return 0.0
    widest = max(linears, key=lambda one: one.inputs * one.outputs)
    if adapter.use_dora:  # a diagonal through both factors, its product, and the weight with it
        return workload.compute_bytes * widest.inputs * (widest.inputs + 3 * widest.outputs)
    if not adapter.is_quantized:
        return 0.0
    size = widest.inputs * widest.outputs
    return workload.compute_bytes * size + DECODING_BYTES * min(size, DECODED_WEIGHTS)


def merged_experts_bytes(case: StepCase) -> float:
    """Return bytes of a layer's expert weights merged with adapters, for a backward pass; 0 if they are not merged."""
    return case.workload.compute_bytes * sum(_merged_experts(case)) / case.shape.num_layers


def merged_experts_workspace(case: StepCase) -> float:
    """Return temporary bytes of a backward pass through experts merged with adapters.

    These are the gradient of the largest expert weight, and the merged weights where they are recomputed.
    """
    again = merged_experts_bytes(case) if case.layout.recomputes else 0.0
    return case.workload.compute_bytes * max(_merged_experts(case), default=0) + again


def _merged_experts(case: StepCase) -> tuple[float, ...]:
    adapter = case.workload.adapter
    if adapter is None or not case.engine.merges_experts:
        return ()
    parts = case.layout.ep * case.engine.expert_split(case.layout)
    return tuple(number / parts for number in merged_experts(case.shape, adapter))


def _kept_inputs(shape: ModelShape, workload: Workload) -> dict[LayerRole, float]:
    """Return by place the share of layers that keep linear layers' inputs for backward; 0 with adapter dropout.

    Adapters then keep their own dropped-out inputs.
    """
    if workload.adapter is None:
        return dict.fromkeys(LayerRole, 1.0)
    return dict.fromkeys(LayerRole, 0.0) if workload.adapter.dropout else input_shares(shape, workload.adapter)


def _adapters_per_token(case: StepCase, *, keeps_results: bool = False) -> float:
    """Return activation bytes per token that LoRA or DoRA adapters keep in one layer for the backward pass.

    These are A x; with DoRA both products that a length scales; with dropout each adapter's mask and dropped input.
    """
    shape, adapter = case.shape, case.workload.adapter
    if adapter is None:
        return 0.0
    size = case.workload.compute_bytes
    linears = [one for layer in adapted_layers(shape, adapter) for one in layer]
    # Summed over all layers, and divided by their number at the end: an adapter may be on some layers only.
    outputs = sum(one.sizes(case.layout.tp if case.engine.splits_by_plan else 1)[1] for one in linears)
    # Added to the weights, an adapter of experts meets no token.
    ranks = adapter.rank * len(linears) + (0.0 if case.engine.merges_experts else stacked_ranks(shape, adapter))
    kept = size * (ranks + (2 * outputs if adapter.use_dora else 0))
    kept += size * outputs if keeps_results else 0
    # The dropped-out input, and a mask of one byte.
    kept += (size + 1) * sum(one.inputs for one in linears) if adapter.dropout and not keeps_results else 0
    return kept / shape.num_layers


def recomputed_products_share(shape: ModelShape, software: ProgramTraits) -> float:
    """Return the share of a layer's matrix-product FLOPs that selective recomputation repeats in the backward pass."""
    if shape.kinds and not software.keeps_every_second_product:
        return recomputed_share(shape)
    # [queries, keys, values, out, …] -> keys, out, … are computed again.
    dropped = _products(shape)[1::2] if software.keeps_every_second_product else ()
    flops = sum(inputs * outputs for inputs, outputs in _products(shape))
    return sum(inputs * outputs for inputs, outputs in dropped) / flops


def _kept_results(shape: ModelShape, layout: Layout, software: ProgramTraits) -> float:
    """Return how many results of products and attention, in values per token, selective recomputation keeps.

    The next layer keeps the last product's result as its input: a compiled layer drops it, an eager one keeps it, too.
    """
    if shape.kinds:
        return kept_results(shape, layout.tp)
    # Results as wide as hidden states, of the last product of attention and of all, are whole on each rank.
    whole = 3, len(_products(shape)) - 1
    products = [
        (inputs, outputs / (1 if place in whole else layout.tp))
        for place, (inputs, outputs) in enumerate(_products(shape))
    ]
    step = 2 if software.keeps_every_second_product else 1
    is_last_kept = (len(products) - 1) % step == 0
    kept = products[:-1:step] if layout.compile and is_last_kept else products[::step]
    return shape.query_width / layout.tp + sum(outputs for _, outputs in kept)


@lru_cache(maxsize=256)
def _products(shape: ModelShape) -> tuple[tuple[float, float], ...]:
    """Return input and output widths of a layer's matrix products: queries, keys, values, out, gate, up, down."""
    ffn = _ffn_width(shape)
    into_attention = [(shape.hidden_size, width) for width in (shape.query_width, shape.kv_width, shape.kv_width)]
    into_ffn = [(shape.hidden_size, ffn)] * (2 if shape.gated_ffn else 1)
    return (*into_attention, (shape.query_width, shape.hidden_size), *into_ffn, (ffn, shape.hidden_size))


def _ffn_width(shape: ModelShape) -> float:
    """Return the feed-forward width per token, averaged over dense and mixture-of-experts layers."""
    mixture = shape.num_mixture_layers / shape.num_layers
    return (1 - mixture) * shape.ffn_size + mixture * shape.experts_per_token * shape.expert_ffn_size


def _ffn_bytes_per_token(
    shape: ModelShape, size: int, into_products: int, inputs: float, software: ProgramTraits
) -> float:
    """Return the bytes per token that a feed-forward block keeps for backward, without tokens sent to experts."""
    into_activation = 1 if software.fp8_activation_inputs else size
    kept: float = into_activation * (2 if shape.gated_ffn else 1) + (0 if software.fused_elementwise else size)
    kept += into_products * inputs
    return kept * _ffn_width(shape)


def _dispatched_bytes(shape: ModelShape, size: int, workload: Workload) -> float:
    """Return the bytes per token of copies for experts: their input, kept only where they learn, and their output."""
    if not shape.num_experts:
        return 0.0
    dispatches = 2 if workload.adapter is None else 1 + dispatched_share(shape, workload.adapter)
    return dispatches * size * shape.experts_per_token * shape.hidden_size
