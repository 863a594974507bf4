"""Activations and products of walked models, of which the planner knows every kind of layer (`stages.models.walk`)."""

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

from stages.models.layer_kinds import KeptBytes, LayerKind, Linear
from stages.models.shape import ModelShape
from stages.planner.adapted import PlannedAdapter, adapted_layers, adapted_parameters
from stages.planner.workload import ProgramTraits, Workload


@lru_cache(maxsize=4096)
def kept_in_layer(
    shape: ModelShape, workload: Workload, software: ProgramTraits, tp: int = 1, along_sequence: int = 1
) -> float:
    """Return the bytes of activations per token that a layer keeps for the backward pass on a rank, on average.

    along_sequence: processes of `tp` that have tokens of their own between blocks.
    """
    size = workload.compute_bytes

    def kept(kind: LayerKind) -> float:
        measured = kind.kept(size)
        by_scores = measured.by_scores * workload.sequence_length
        if not workload.learns("language_model"):
            return shared(measured.frozen, measured.split_frozen) + by_scores
        if software.fused_elementwise and not kind.state_products:
            return min(trained(measured), size * _fused(kind, shape.hidden_size, tp)) + by_scores
        return trained(measured) + by_scores

    def trained(measured: KeptBytes) -> float:
        return shared(measured.trained, measured.split_trained)

    def shared(kept: float, split: float) -> float:
        return (kept - split) / along_sequence + split / tp

    inputs = _inputs_for_adapters(shape, workload.adapter, tp) if workload.adapter else 0.0
    return shape.mean(kept) + size * inputs


def kept_results(shape: ModelShape, tp: int = 1) -> float:
    """Return how many results of products and attention, in values per token, selective recomputation keeps."""

    def kept(kind: LayerKind) -> float:
        heads = tp if any(one.split == "columns" for one in kind.linears) else 1
        computed_again = sum(kind.experts_computed * one.sizes(tp)[1] for one in kind.experts if one.has_bias)
        attended = sum(one.num_heads * one.value_width for one in kind.attention) / heads
        return _results(kind, tp) - computed_again + attended

    return shape.mean(kept)


@lru_cache(maxsize=256)
def recomputed_share(shape: ModelShape) -> float:
    """Return the share of the products' FLOPs that selective recomputation repeats: products of experts with biases.

    Transformers adds a bias to them in place, so that they cannot be kept.
    """
    again = shape.mean(
        lambda kind: sum(kind.experts_computed * one.inputs * one.outputs for one in kind.experts if one.has_bias)
    )
    return again / shape.mean(lambda kind: sum(inputs * outputs for inputs, outputs in products(kind)))


def widest_products(shape: ModelShape, tp: int = 1) -> float:
    """Return the values per token of the widest results of one input: queries, keys and values, or gate and up."""
    return max((outputs for kind in shape.kinds for _, outputs in products(kind, tp)), default=0.0)


def largest_for_a_moment(shape: ModelShape, bytes_per_value: int, tp: int = 1) -> float:
    """Return the bytes per token of the largest tensor that a layer makes on a rank, and does not keep."""
    kept = [kind.kept(bytes_per_value) for kind in shape.kinds]
    return max((max(one.for_a_moment, one.split_for_a_moment / tp) for one in kept), default=0.0)


def dense_products(kind: LayerKind, tp: int = 1) -> Iterator[tuple[float, float]]:
    """Yield inputs and outputs of a layer's linear layers on a rank; those with the same input are one product."""
    joined: dict[object, list[Linear]] = defaultdict(list)
    for one in kind.linears:
        joined[one.name if one.source is None else one.source].append(one)
    for linears in joined.values():
        yield linears[0].sizes(tp)[0], sum(one.sizes(tp)[1] for one in linears)


def products(kind: LayerKind, tp: int = 1) -> Iterator[tuple[float, float]]:
    """Yield inputs and outputs, per token, of a layer's products on a rank, those of routed experts included."""
    yield from dense_products(kind, tp)
    for stacked in kind.experts:
        inputs, outputs = stacked.sizes(tp)
        yield inputs, kind.experts_computed * outputs


def kept_values(shape: ModelShape, bytes_per_value: int) -> tuple[float, float]:
    """Return how many values per token a layer keeps on average where it learns: a measure of what moves in memory.

    Those that each rank has whole, and those that tensor parallelism splits.
    """
    kept = shape.mean(lambda kind: kind.kept(bytes_per_value).trained) / bytes_per_value
    split = shape.mean(lambda kind: kind.kept(bytes_per_value).split_trained) / bytes_per_value
    return kept - split, split


def _fused(kind: LayerKind, hidden_size: int, tp: int) -> float:
    """Return the values per token that a layer keeps whose elementwise operations are fused: inputs and results."""
    inputs = sum(inputs for inputs, _ in products(kind, tp))
    dispatched = 2 * kind.experts_computed * hidden_size
    return inputs + _results(kind, tp) + dispatched


def _results(kind: LayerKind, tp: int) -> float:
    return sum(outputs for _, outputs in products(kind, tp))


@lru_cache(maxsize=256)
def _inputs_for_adapters(shape: ModelShape, adapter: PlannedAdapter, tp: int) -> float:
    """Return the values per token that a layer keeps, on average, only because adapters on it learn."""
    if adapter.dropout:  # adapters keep their own inputs, dropped out
        return 0.0
    total = 0.0
    for layer in adapted_layers(shape, adapter):
        total += sum({(one.source, one.inputs): one.sizes(tp)[0] for one in layer if one.keeps_input}.values())
    stacked = adapted_parameters(shape, adapter)
    for kind in shape.kinds:
        learning = (one for layer in kind.layers for one, _ in stacked[layer] if not one.is_router)
        total += kind.experts_computed * sum(one.sizes(tp)[0] for one in learning)
    return total / shape.num_layers
