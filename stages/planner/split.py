"""Values that processes of `tp` exchange for a layer whose matrices are split by Transformers' plan.

A product of a matrix that is split by its inputs is summed over processes, and so is the gradient of the input of
matrices that are split by their results: once for those of one input, such as queries, keys and values.
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
    """Values that a recomputed forward pass sums: it ends before the last sum, which the backward pass does not need.
    """
    summed_backward: float
    gathered: float
    """Values of results that every process gets whole in a forward pass."""
    gathered_backward: float
    """Values of gradients that every process gets whole: of an input that all had whole, and of which each took a part.
    """


@lru_cache(maxsize=256)
def split_values(shape: ModelShape) -> SplitValues:
    """Return what a layer's passes exchange under tensor parallelism."""
    forward = backward = gathered = gathered_backward = 0.0
    for layer in range(shape.num_layers):
        inputs, linears = dict[object, float](), linear_layers(shape, layer)
        gathering = {_block(one.name) for one in linears if one.split == "gathered"}
        for linear in linears:
            gathered_backward += linear.inputs * (linear.split == "rows" and _block(linear.name) in gathering)
            forward += linear.outputs * (linear.split == "rows")
            gathered += linear.outputs * (linear.split == "gathered")
            backward += linear.inputs * (linear.split == "gathered")
            if linear.split == "columns":
                inputs[linear.place if linear.source is None else linear.source] = linear.inputs
        backward += sum(inputs.values())
        if any(one.split for one in stacked_parameters(shape, layer)):  # of all experts together
            forward += shape.hidden_size
            backward += shape.hidden_size
    by_layer = [total / shape.num_layers for total in (forward, backward, gathered, gathered_backward)]
    return SplitValues(by_layer[0], max(0.0, by_layer[0] - shape.hidden_size), *by_layer[1:])


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


def _block(name: str) -> str:
    """Return the name of the attention or feed-forward block that a linear layer is in."""
    return name.rpartition(".")[0]
