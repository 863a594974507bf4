"""Values that processes of `tp` exchange for a layer whose matrices are split by Transformers' plan.

A product of a matrix that is split by its inputs is summed over processes, and so is the gradient of the input of
matrices that are split by their results: once for those of one input in a block, such as queries, keys and values.
A block ends with a matrix that is split by its inputs.
"""

from dataclasses import dataclass
from functools import lru_cache

from stages.models.layer_kinds import LayerRole
from stages.models.linear_layers import linear_layers, stacked_parameters
from stages.models.shape import ModelShape
from stages.planner.adapted import PlannedAdapter, first_learning_layer


@dataclass(frozen=True)
class SplitValues:
    """Values per token that processes of `tp` exchange for a layer, on average over a model's layers."""

    summed_forward: float
    summed_again: float
    """Values that a recomputed forward pass sums: it ends before a layer's last sum, unless a norm comes after it."""
    summed_backward: float
    gathered: float
    """Values of results that every process gets whole in a forward pass."""
    gathered_backward: float
    """Values of gradients that every process gets whole: of an input that all had whole, and of which each took a part.
    """


@lru_cache(maxsize=256)
def split_values(shape: ModelShape) -> SplitValues:
    """Return what a layer's passes exchange under tensor parallelism."""
    forward = again = backward = gathered = gathered_backward = 0.0
    for layer in range(shape.num_layers):
        inputs, linears, before = dict[object, float](), linear_layers(shape, layer), forward
        for linear in linears:
            gathered_backward += linear.inputs * (linear.split == "cut rows")
            if linear.split in ("rows", "cut rows"):
                forward += linear.outputs
                backward += sum(inputs.values())
                inputs.clear()
            gathered += linear.outputs * (linear.split == "gathered")
            backward += linear.inputs * (linear.split == "gathered")
            if linear.split == "columns":
                inputs[linear.place if linear.source is None else linear.source] = linear.inputs
        backward += sum(inputs.values())
        if any(one.split for one in stacked_parameters(shape, layer)):  # of all experts together
            forward += shape.hidden_size
            backward += shape.hidden_size
        kind = shape.kind_of(layer)
        last = shape.hidden_size if kind is None or kind.ends_in_sum else 0
        again += max(0.0, forward - before - last)
    totals = forward, again, backward, gathered, gathered_backward
    return SplitValues(*(total / shape.num_layers for total in totals))


@lru_cache(maxsize=256)
def not_summed_beside(adapter: PlannedAdapter, shape: ModelShape) -> float:
    """Return values per token whose gradients nothing needs, over all layers, so that they are not summed.

    Beside an adapter on a frozen base they are inputs of the first products of the first layer that learns.
    """
    first = first_learning_layer(shape, adapter)
    if adapter.modules_to_save or first == shape.num_layers:
        return 0.0
    begins = [one for one in linear_layers(shape, first) if one.place is LayerRole.INTO_ATTENTION]
    first_products: float = sum(one.inputs for one in begins if one.split == "gathered")
    first_products += max((one.inputs for one in begins if one.split == "columns"), default=0.0)
    return first * split_values(shape).summed_backward + first_products
