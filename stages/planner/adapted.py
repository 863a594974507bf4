"""Sizes of adapters for the planner: trainable LoRA parameters, and bytes of the frozen base model, layer by layer.

`AdapterTargets` chooses the layers (Hu et al. 2021, section 4.1): a linear layer of `inputs` and `outputs` gets A
[rank, inputs] and B [outputs, rank]; each of stacked experts gets its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from stages.models.adapter_targets import FORMER_NAMES, AdapterTargets, is_saved
from stages.models.flops import ModelFlops
from stages.models.layer_kinds import LayerRole, Linear, StackedParameter
from stages.models.linear_layers import (
    NF4_BLOCK,
    linear_layers,
    module_parameters,
    quantizing_error,
    stacked_parameters,
)
from stages.models.shape import ModelShape
from stages.parallel.layout import Layout
from stages.planner.partition import PipelineStage, RankParameters, pipeline_stages, rank_parameters


@dataclass(frozen=True)
class PlannedAdapter:
    """LoRA adapter as the planner sees it: the fields of a recipe's `adapter:` block that affect memory or time."""

    rank: int
    target_modules: str | tuple[str, ...] = "all-linear"
    target_parameters: tuple[str, ...] = ()
    exclude_modules: tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] | None = None
    modules_to_save: tuple[str, ...] = ()
    use_dora: bool = False
    dropout: float = 0.0
    base_precision: Literal["bf16", "fp32", "nf4", "int8"] | None = None
    init: str = "default"

    @property
    def is_quantized(self) -> bool:
        """True if the base model's linear layers are stored in 4 or 8 bits and dequantized for each use."""
        return self.base_precision in ("nf4", "int8")

    @property
    def used_options(self) -> dict[str, object]:
        """Options that differ from their defaults, by name."""
        default = PlannedAdapter(self.rank)
        return {name: value for name, value in vars(self).items() if value != getattr(default, name)}

    def base_errors(self, shape: ModelShape) -> Iterator[str]:
        """Yield why the frozen model of this shape cannot be stored in `base_precision`."""
        if self.is_quantized and (error := quantizing_error(shape, self.base_precision or "", self.saves)):
            yield error

    def saves(self, name: str) -> bool:
        """Return whether a module, or one that contains it, is trained in full (`modules_to_save`)."""
        return is_saved(name, self.modules_to_save)


ROW_SCALE_BYTES = 4


@lru_cache(maxsize=256)
def adapted_layers(shape: ModelShape, adapter: PlannedAdapter) -> tuple[tuple[Linear, ...], ...]:
    """Return the linear layers that get an adapter, grouped by the model's transformer layers."""
    targets = _targets(shape, adapter)
    return tuple(
        tuple(one for one in linear_layers(shape, layer) if targets.has_layer(one.name))
        for layer in range(shape.num_layers)
    )


@lru_cache(maxsize=256)
def adapted_parameters(
    shape: ModelShape, adapter: PlannedAdapter
) -> tuple[tuple[tuple[StackedParameter, int], ...], ...]:
    """Return the stacked expert and router parameters that get an adapter, with their LoRA rank, by model layer."""
    targets = _targets(shape, adapter)
    return tuple(
        tuple(
            (one, adapter.rank * ranks)
            for one in stacked_parameters(shape, layer)
            if (ranks := targets.ranks_of(one.name))
        )
        for layer in range(shape.num_layers)
    )


@lru_cache(maxsize=256)
def with_whole_layers(shape: ModelShape, adapter: PlannedAdapter) -> ModelShape:
    """Return the shape in which adapted layers that have whole inputs and outputs on each process are whole, too.

    Plans of tensor parallelism gather the results of such layers, or cut their inputs; with an adapter, the engine
    leaves them as they are (`stages.engines.fsdp.split_adapters`).
    """
    kinds = []
    for kind in shape.kinds:
        by_adapted: dict[frozenset[str], list[int]] = {}
        for layer in kind.layers:
            prefix = f"{kind.name_of(layer)}."
            adapted = (one for one in adapted_layers(shape, adapter)[layer] if one.split in ("gathered", "cut rows"))
            by_adapted.setdefault(frozenset(one.name.removeprefix(prefix) for one in adapted), []).append(layer)
        for names, layers in by_adapted.items():
            whole = sum(one.inputs * one.outputs for one in kind.linears if one.name in names)
            linears = tuple(replace(one, split=None) if one.name in names else one for one in kind.linears)
            num_split = kind.num_split_parameters - whole
            kinds.append(replace(kind, layers=tuple(layers), linears=linears, num_split_parameters=num_split))
    return replace(shape, kinds=tuple(kinds))


def _targets(shape: ModelShape, adapter: PlannedAdapter) -> AdapterTargets:
    return AdapterTargets(adapter, dict(shape.former_names) or FORMER_NAMES.get(shape.family, {}))


@lru_cache(maxsize=65536)
def trained_parameters(
    shape: ModelShape, adapter: PlannedAdapter, joins_layers: bool, stage: PipelineStage, tp: int, vpp: int
) -> float:
    """Count the trainable parameters on one process rank of a pipeline stage, before data-parallel sharding.

    Without those of experts. joins_layers: whether the engine fuses linear layers (`EngineCosts.joins_layers`).
    """
    layers, share = _layers_of(shape, stage, vpp)
    factors = sum(_layer_parameters(shape, adapter, joins_layers, layer, tp) for layer in layers)
    # Modules that are saved whole count on every stage, wherever they are.
    return share * factors + saved_parameters(shape, adapter)


@lru_cache(maxsize=65536)
def trained_expert_parameters(
    shape: ModelShape, adapter: PlannedAdapter, stage: PipelineStage, vpp: int, ep: int, etp: int
) -> float:
    """Count the trainable parameters in experts' adapters, on their experts' ranks, on one rank of a pipeline stage."""
    layers, share = _layers_of(shape, stage, vpp)
    adapted = adapted_parameters(shape, adapter)
    return share * sum(
        one.num_experts / ep * _factor_parameters(one, rank, etp)
        for layer in layers
        for one, rank in adapted[layer]
        if not one.is_router
    )


@lru_cache(maxsize=256)
def merged_experts(shape: ModelShape, adapter: PlannedAdapter) -> tuple[int, ...]:
    """Return the number of weights of each expert parameter whose adapter is merged into it before use."""
    adapted = (one for layer in adapted_parameters(shape, adapter) for one, _ in layer if not one.is_router)
    return tuple(one.num_experts * one.inputs * one.outputs for one in adapted)


@lru_cache(maxsize=256)
def adapted_flops(shape: ModelShape, adapter: PlannedAdapter) -> ModelFlops:
    """Return the FLOPs per token of a model trained with an adapter, counting only the experts that a token visits."""
    added, saved = 0.0, 0.0
    for layer in range(shape.num_layers):
        stacked = stacked_parameters(shape, layer)
        # Number of copies of each stacked parameter that a token meets: every router, its own experts only.
        met = {one.name: 1 if one.is_router else shape.experts_per_token for one in stacked}
        added += sum(_factor_parameters(one, adapter.rank, 1) for one in adapted_layers(shape, adapter)[layer])
        added += sum(
            met[one.name] * _factor_parameters(one, rank, 1) for one, rank in adapted_parameters(shape, adapter)[layer]
        )
        matrices: tuple[Linear | StackedParameter, ...] = (*linear_layers(shape, layer), *stacked)
        saved += sum(met.get(one.name, 1) * one.inputs * one.outputs for one in matrices if adapter.saves(one.name))
    base = shape.flops()
    return replace(
        base,
        layer_parameters=base.layer_parameters + added,
        # Frozen weights still cost FLOPs forward, and backward for the gradients of activations.
        frozen_layer_parameters=base.layer_parameters - saved,
        is_head_frozen=not adapter.saves("lm_head"),
    )


def learning_parameters(
    shape: ModelShape,
    joins_layers: bool,
    layout: Layout,
    expert_split: int,
    adapter: PlannedAdapter | None,
    stage: PipelineStage,
) -> RankParameters:
    """Count all trainable parameters on one process rank of a pipeline stage, before data-parallel sharding.

    expert_split: number of ranks over which the matrices of each expert are split.
    """
    if adapter is None:
        return rank_parameters(shape, stage, layout.tp, layout.ep, expert_split)
    experts = trained_expert_parameters(shape, adapter, stage, layout.vpp, layout.ep, expert_split)
    return RankParameters(trained_parameters(shape, adapter, joins_layers, stage, layout.tp, layout.vpp), experts)


def _layers_of(shape: ModelShape, stage: PipelineStage, vpp: int) -> tuple[range, float]:
    """Return a pipeline stage's layers, and the factor that turns a sum over these layers into the stage's total.

    An interleaved stage gets all layers, with its share of them as the factor; any other stage its own layers and 1.
    """
    if vpp > 1:
        return range(shape.num_layers), stage.num_layers / shape.num_layers
    return range(stage.first_layer, stage.first_layer + stage.num_layers), 1.0


@lru_cache(maxsize=65536)
def joined_bytes(
    shape: ModelShape, adapter: PlannedAdapter, stage: PipelineStage, tp: int, compute_bytes: int
) -> float:
    """Return the extra bytes of LoRA adapters on linear layers that Megatron fuses (queries, keys, values; gate, up).

    A block mask says which A a row of B belongs to; mask and its product with B are [rows, fused layers × rank] each.
    """
    total = 0
    for layer, adapted in enumerate(adapted_layers(shape, adapter)):
        for place in {one.place for one in adapted}:
            outputs = [one.outputs for one in linear_layers(shape, layer) if one.place is place]
            # Outputs [4096, 1024, 1024] at rank 16: a block mask of 6144 × 48.
            total += sum(outputs) * len(outputs) * adapter.rank if len(outputs) > 1 else 0
    # Mask and product; an average layer's, times the layers of this stage.
    return 2 * compute_bytes * total / tp * stage.num_layers / shape.num_layers


@lru_cache(maxsize=256)
def saved_parameters(shape: ModelShape, adapter: PlannedAdapter) -> int:
    """Count the parameters of the modules that are trained in full beside the adapter (`modules_to_save`)."""
    if not adapter.modules_to_save:
        return 0
    return sum(size for name, size in module_parameters(shape).items() if adapter.saves(name))


@lru_cache(maxsize=256)
def input_shares(shape: ModelShape, adapter: PlannedAdapter) -> dict[LayerRole, float]:
    """Return by place the share of layers that train their linear layers, and so keep their inputs for backward."""
    learn = []
    for layer, adapted in enumerate(adapted_layers(shape, adapter)):
        saved = {one.place for one in linear_layers(shape, layer) if adapter.saves(one.name)}
        stacked = {one.place for one in _learning_stacks(shape, adapter, layer) if not _is_dispatched_to(one)}
        # The experts' input is the dispatched tokens, which `dispatched_share` counts.
        learn.append({one.place for one in adapted} | saved | stacked)
    return {place: sum(place in one for one in learn) / shape.num_layers for place in LayerRole}


@lru_cache(maxsize=256)
def dispatched_share(shape: ModelShape, adapter: PlannedAdapter) -> float:
    """Return the share of mixture-of-experts layers whose experts are trained, so that they keep dispatched tokens."""
    learn = [any(map(_is_dispatched_to, _learning_stacks(shape, adapter, layer))) for layer in range(shape.num_layers)]
    # No mixture layers: 0 / 1.
    return sum(learn) / max(1, shape.num_mixture_layers)


@lru_cache(maxsize=256)
def stacked_ranks(shape: ModelShape, adapter: PlannedAdapter) -> float:
    """Count the activation values (A x) per token that experts' and routers' adapters keep, over all layers."""
    adapted = (one for layer in adapted_parameters(shape, adapter) for one in layer)
    return sum(rank * (1 if one.is_router else shape.experts_per_token) for one, rank in adapted)


def _learning_stacks(shape: ModelShape, adapter: PlannedAdapter, layer: int) -> list[StackedParameter]:
    adapted = [one for one, _ in adapted_parameters(shape, adapter)[layer]]
    return adapted + [one for one in stacked_parameters(shape, layer) if adapter.saves(one.name)]


def _is_dispatched_to(one: StackedParameter) -> bool:
    return one.place is LayerRole.INTO_FFN and not one.is_router


@lru_cache(maxsize=256)
def first_learning_layer(shape: ModelShape, adapter: PlannedAdapter) -> int:
    """Return the index of the first layer with trainable weights; earlier layers keep nothing for the backward pass."""
    if adapter.modules_to_save:  # such as the embedding, before them all
        return 0
    layers = zip(adapted_layers(shape, adapter), adapted_parameters(shape, adapter), strict=True)
    return next((layer for layer, adapted in enumerate(layers) if any(adapted)), shape.num_layers)


@lru_cache(maxsize=256)
def frozen_bytes(shape: ModelShape, adapter: PlannedAdapter, compute_bytes: int) -> float:
    """Return the bytes of the whole frozen base model as the FSDP engine stores it, before sharding."""
    other_bytes = {"bf16": 2, "fp32": 4}.get(adapter.base_precision or "", compute_bytes)
    linears = [one for layer in range(shape.num_layers) for one in linear_layers(shape, layer)]
    # Only linear layers are quantized; embedding, norms and experts stay in the other precision.
    frozen = [one for one in linears if not adapter.saves(one.name)]
    others = shape.num_parameters - saved_parameters(shape, adapter) - sum(one.inputs * one.outputs for one in frozen)
    return other_bytes * others + sum(_stored_bytes(one, adapter.base_precision, other_bytes) for one in frozen)


@lru_cache(maxsize=256)
def decoding_bytes(shape: ModelShape, adapter: PlannedAdapter, compute_bytes: int) -> float:
    """Return the bytes that decoding a layer's frozen 4- or 8-bit weights once reads and writes, on average."""
    if not adapter.is_quantized:
        return 0.0
    linears = [one for layer in range(shape.num_layers) for one in linear_layers(shape, layer)]
    frozen = [one for one in linears if not adapter.saves(one.name)]
    written = compute_bytes * sum(one.inputs * one.outputs for one in frozen)
    return (written + sum(_stored_bytes(one, adapter.base_precision, 0) for one in frozen)) / shape.num_layers


@lru_cache(maxsize=256)
def gathered_layer_bytes(shape: ModelShape, adapter: PlannedAdapter, compute_bytes: int) -> float:
    """Return the bytes of one whole layer with its adapter as FSDP gathers it; quantized weights stay packed."""
    # FSDP2 casts floating-point weights to the compute precision as it gathers them; packed bytes it leaves as they
    # are.
    frozen = frozen_bytes(
        shape, adapter if adapter.is_quantized else replace(adapter, base_precision=None), compute_bytes
    )
    (whole,) = pipeline_stages(shape.num_layers, 1)
    trained = trained_parameters(shape, adapter, False, whole, 1, 1)
    trained += trained_expert_parameters(shape, adapter, whole, 1, 1, 1)
    outside = shape.embedding_parameters + shape.head_parameters + shape.other_parameters
    # Embedding and head are gathered apart from the layers.
    return (frozen + compute_bytes * (trained - outside)) / shape.num_layers


def _layer_parameters(shape: ModelShape, adapter: PlannedAdapter, joins_layers: bool, layer: int, tp: int) -> float:
    linears = adapted_layers(shape, adapter)[layer]
    if joins_layers:
        places = {one.place for one in linears}
        # An adapter on one of the fused matrices is one on all of them.
        linears = tuple(one for one in linear_layers(shape, layer) if one.place in places)
    # DoRA learns a length for each output row, which is not cut.
    lengths = sum(one.outputs for one in linears) if adapter.use_dora else 0
    routers = [(one, rank) for one, rank in adapted_parameters(shape, adapter)[layer] if one.is_router]
    factors = sum(_factor_parameters(one, adapter.rank, tp) for one in linears)
    return factors + lengths + sum(_factor_parameters(one, rank, 1) for one, rank in routers)


def _factor_parameters(layer: Linear | StackedParameter, rank: int, tp: int) -> float:
    """Count an adapter's parameters on one rank: tensor parallelism shards column-parallel B, row-parallel A."""
    return rank * sum(layer.sizes(tp))


def _stored_bytes(linear: Linear, precision: str | None, other_bytes: int) -> float:
    """Return the bytes of one frozen weight matrix: packed nf4 or int8 with scales, else `other_bytes` per weight."""
    if precision == "nf4":
        # A row of 4096 weights: 2048 bytes of codes, 64 block scales of one byte, and the row's scale in fp32.
        return linear.outputs * (linear.inputs / 2 + linear.inputs / NF4_BLOCK + ROW_SCALE_BYTES)
    if precision == "int8":
        return linear.outputs * (linear.inputs + ROW_SCALE_BYTES)
    return linear.outputs * linear.inputs * other_bytes
