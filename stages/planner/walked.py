"""Activations and products of walked models, of which the planner knows every kind of layer (`stages.models.walk`)."""

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

from stages.models.layer_kinds import LayerKind, Linear
from stages.models.shape import ModelShape
from stages.planner.adapted import PlannedAdapter, adapted_layers, adapted_parameters
from stages.planner.workload import ProgramTraits, Workload


@lru_cache(maxsize=4096)
def kept_in_layer(shape: ModelShape, workload: Workload, software: ProgramTraits) -> float:
    """Return the bytes of activations per token that a layer keeps for the backward pass, on average."""
    size = workload.compute_bytes

    def kept(kind: LayerKind) -> float:
        measured = kind.kept(size)
        by_scores = measured.by_scores * workload.sequence_length
        if not workload.learns("language_model"):
            return measured.frozen + by_scores
        if software.fused_elementwise and not kind.state_products:
            return min(measured.trained, size * _fused(kind, shape.hidden_size)) + by_scores
        return measured.trained + by_scores

    inputs = _inputs_for_adapters(shape, workload.adapter) if workload.adapter else 0.0
    return shape.mean(kept) + size * inputs


def kept_results(shape: ModelShape) -> float:
    """Return how many results of products and attention, in values per token, selective recomputation keeps."""
    return shape.mean(lambda kind: _results(kind) + sum(one.num_heads * one.value_width for one in kind.attention))


def widest_products(shape: ModelShape) -> float:
    """Return the values per token of the widest results of one input: queries, keys and values, or gate and up."""
    return max((outputs for kind in shape.kinds for _, outputs in products(kind)), default=0.0)


def largest_for_a_moment(shape: ModelShape, bytes_per_value: int) -> float:
    """Return the bytes per token of the largest tensor that a layer makes on the way, and does not keep."""
    return max((kind.kept(bytes_per_value).for_a_moment for kind in shape.kinds), default=0.0)


def dense_products(kind: LayerKind) -> Iterator[tuple[float, float]]:
    """Yield inputs and outputs of a layer's linear layers; those with the same input are one product."""
    joined: dict[object, list[Linear]] = defaultdict(list)
    for one in kind.linears:
        joined[one.name if one.source is None else one.source].append(one)
    for linears in joined.values():
        yield linears[0].inputs, sum(one.outputs for one in linears)


def products(kind: LayerKind) -> Iterator[tuple[float, float]]:
    """Yield inputs and outputs, per token, of a layer's products, those of routed experts included."""
    yield from dense_products(kind)
    for stacked in kind.experts:
        yield stacked.inputs, kind.experts_computed * stacked.outputs


def kept_values(shape: ModelShape, bytes_per_value: int) -> float:
    """Return how many values per token a layer keeps on average where it learns: a measure of what moves in memory."""
    return shape.mean(lambda kind: kind.kept(bytes_per_value).trained) / bytes_per_value


def _fused(kind: LayerKind, hidden_size: int) -> float:
    """Return the values per token that a layer keeps whose elementwise operations are fused: inputs and results."""
    inputs = sum(inputs for inputs, _ in products(kind))
    dispatched = 2 * kind.experts_computed * hidden_size
    return inputs + _results(kind) + dispatched


def _results(kind: LayerKind) -> float:
    return sum(outputs for _, outputs in products(kind))


@lru_cache(maxsize=256)
def _inputs_for_adapters(shape: ModelShape, adapter: PlannedAdapter) -> float:
    """Return the values per token that a layer keeps, on average, only because adapters on it learn."""
    if adapter.dropout:  # adapters keep their own inputs, dropped out
        return 0.0
    total = 0
    for layer in adapted_layers(shape, adapter):
        total += sum({(one.source, one.inputs): one.inputs for one in layer if one.keeps_input}.values())
    stacked = adapted_parameters(shape, adapter)
    for kind in shape.kinds:
        learning = (one for layer in kind.layers for one, _ in stacked[layer] if not one.is_router)
        total += kind.experts_computed * sum(one.inputs for one in learning)
    return total / shape.num_layers
