"""What learns when an adapter is trained, and what its frozen base is kept in: by layer, counted. Pure.

Targets are named and chosen as PEFT does it, in the words of the Transformers model (Hu et al. 2021, section 4.1): a
layer of `inputs` and `outputs` gets A [rank, inputs] and B [outputs, rank].
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from stages.models.linear_layers import Linear, Place, linear_layers, module_parameters
from stages.models.shape import ModelShape
from stages.parallel.layout import EngineName
from stages.planner.partition import PipelineStage, pipeline_stages

NF4_BLOCK = 64
"""Weights along a row that share a scale of a byte; see `stages.adapters.quantized`."""
ROW_SCALE_BYTES = 4


@dataclass(frozen=True)
class LowRank:
    """The fields of a recipe's `adapter:` that decide memory or time, meant as there."""

    rank: int
    target_modules: str | tuple[str, ...] = "all-linear"
    exclude_modules: tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] | None = None
    modules_to_save: tuple[str, ...] = ()
    use_dora: bool = False
    dropout: float = 0.0
    base_precision: Literal["bf16", "fp32", "nf4", "int8"] | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether frozen linear layers are kept as bytes of which weights are made when they are used."""
        return self.base_precision in ("nf4", "int8")

    def targets(self, name: str, layer: int) -> bool:
        """Whether PEFT adapts the linear layer of this name."""
        if _ends(name, self.exclude_modules) or self.saves(name):
            return False
        if self.layers_to_transform is not None and layer not in self.layers_to_transform:
            return False
        if isinstance(self.target_modules, str):
            return self.target_modules == "all-linear" or re.fullmatch(self.target_modules, name) is not None
        return _ends(name, self.target_modules)

    def saves(self, name: str) -> bool:
        """Whether the module of this name learns as a whole, by itself or in one that does."""
        parts = name.split(".")
        modules = (".".join(parts[: index + 1]) for index in range(len(parts)))
        return any(module.endswith(end) for module in modules for end in self.modules_to_save)


@lru_cache(maxsize=256)
def adapted_layers(shape: ModelShape, adapter: LowRank) -> tuple[tuple[Linear, ...], ...]:
    """Linear layers that have an adapter, by the layer of the model."""
    layers = (linear_layers(shape, layer) for layer in range(shape.num_layers))
    return tuple(
        tuple(one for one in linears if adapter.targets(one.name, layer)) for layer, linears in enumerate(layers)
    )


@lru_cache(maxsize=65536)
def trained_parameters(
    shape: ModelShape, adapter: LowRank, engine: EngineName, stage: PipelineStage, tp: int, vpp: int
) -> float:
    """That learn, of one rank of a pipeline stage, before data parallelism shards them."""
    first, last = stage.first_layer, stage.first_layer + stage.num_layers
    layers = range(shape.num_layers) if vpp > 1 else range(first, last)
    share = stage.num_layers / shape.num_layers if vpp > 1 else 1
    factors = sum(_layer_parameters(shape, adapter, engine, layer, tp) for layer in layers)
    return share * factors + saved_parameters(shape, adapter)


@lru_cache(maxsize=65536)
def joined_bytes(shape: ModelShape, adapter: LowRank, stage: PipelineStage, tp: int, compute_bytes: int) -> float:
    """Where Megatron joins several layers (queries, keys, values; gate, up), the mask that says which A a row of B
    belongs to, and the product of both: [rows, joined × rank] each."""
    total = 0
    for layer, adapted in enumerate(adapted_layers(shape, adapter)):
        for place in {one.place for one in adapted}:
            outputs = [one.outputs for one in linear_layers(shape, layer) if one.place is place]
            total += sum(outputs) * len(outputs) * adapter.rank if len(outputs) > 1 else 0
    return 2 * compute_bytes * total / tp * stage.num_layers / shape.num_layers


@lru_cache(maxsize=256)
def saved_parameters(shape: ModelShape, adapter: LowRank) -> int:
    """Of modules that learn as a whole."""
    if not adapter.modules_to_save:
        return 0
    return sum(size for name, size in module_parameters(shape).items() if adapter.saves(name))


@lru_cache(maxsize=256)
def input_shares(shape: ModelShape, adapter: LowRank) -> dict[Place, float]:
    """Share of the model's layers in which a linear layer of a place learns, so that its input is kept."""
    learn = [
        {one.place for one in adapted} | {one.place for one in linear_layers(shape, layer) if adapter.saves(one.name)}
        for layer, adapted in enumerate(adapted_layers(shape, adapter))
    ]
    return {place: sum(place in one for one in learn) / shape.num_layers for place in Place}


@lru_cache(maxsize=256)
def first_learning_layer(shape: ModelShape, adapter: LowRank) -> int:
    """Number of the first layer through which gradients go back: those before it keep nothing for that."""
    if adapter.modules_to_save:  # such as the embedding, before them all
        return 0
    layers = adapted_layers(shape, adapter)
    return next((layer for layer, adapted in enumerate(layers) if adapted), shape.num_layers)


@lru_cache(maxsize=256)
def frozen_bytes(shape: ModelShape, adapter: LowRank, compute_bytes: int) -> float:
    """Of the whole base, as the FSDP engine keeps it: what does not learn."""
    other_bytes = {"bf16": 2, "fp32": 4}.get(adapter.base_precision or "", compute_bytes)
    linears = [one for layer in range(shape.num_layers) for one in linear_layers(shape, layer)]
    frozen = [one for one in linears if not adapter.saves(one.name)]
    others = shape.num_parameters - saved_parameters(shape, adapter) - sum(one.inputs * one.outputs for one in frozen)
    return other_bytes * others + sum(_stored_bytes(one, adapter.base_precision, other_bytes) for one in frozen)


@lru_cache(maxsize=256)
def gathered_layer_bytes(shape: ModelShape, adapter: LowRank, compute_bytes: int) -> float:
    """Of a layer with its adapter, whole, as the FSDP engine computes with it: 4 or 8 bits stay what they are."""
    frozen = frozen_bytes(
        shape, adapter if adapter.is_quantized else replace(adapter, base_precision=None), compute_bytes
    )
    (whole,) = pipeline_stages(shape.num_layers, 1)
    trained = trained_parameters(shape, adapter, "fsdp", whole, 1, 1)
    outside = shape.embedding_parameters + shape.head_parameters
    return (frozen + compute_bytes * (trained - outside)) / shape.num_layers


def _layer_parameters(shape: ModelShape, adapter: LowRank, engine: EngineName, layer: int, tp: int) -> float:
    linears = adapted_layers(shape, adapter)[layer]
    if engine == "megatron":  # one matrix has factors for all that it is made of, or for none
        places = {one.place for one in linears}
        linears = tuple(one for one in linear_layers(shape, layer) if one.place in places)
    lengths = sum(one.outputs for one in linears) if adapter.use_dora else 0
    return sum(_factor_parameters(one, adapter.rank, tp) for one in linears) + lengths


def _factor_parameters(linear: Linear, rank: int, tp: int) -> float:
    """Of A and B on one rank: the factor on the side that tensor parallelism cuts is cut with it."""
    if linear.place.cuts_inputs:
        return rank * (linear.inputs / tp + linear.outputs)
    return rank * (linear.inputs + linear.outputs / tp)


def _stored_bytes(linear: Linear, precision: str | None, other_bytes: int) -> float:
    """Of the frozen weight: in 4 or 8 bits with their scales, else `other_bytes` a weight."""
    if precision == "nf4":
        return linear.outputs * (linear.inputs / 2 + linear.inputs / NF4_BLOCK + ROW_SCALE_BYTES)
    if precision == "int8":
        return linear.outputs * (linear.inputs + ROW_SCALE_BYTES)
    return linear.outputs * linear.inputs * other_bytes


def _ends(name: str, ends: tuple[str, ...]) -> bool:
    """As PEFT compares them: equal, or the last parts."""
    return any(name == end or name.endswith(f".{end}") for end in ends)
