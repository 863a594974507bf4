"""Values that processes of `tp` exchange for a layer whose matrices are split by Transformers' plan.

A product of a matrix that is split by its inputs is summed over processes, and so is the gradient of the input of
matrices that are split by their results: once for those of one input, such as queries, keys and values.
"""

from dataclasses import dataclass
from functools import lru_cache

from stages.models.linear_layers import linear_layers, stacked_parameters
from stages.models.shape import ModelShape


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


@lru_cache(maxsize=256)
def split_values(shape: ModelShape) -> SplitValues:
    """Return what a layer's passes exchange under tensor parallelism."""
    forward = backward = gathered = 0.0
    for layer in range(shape.num_layers):
        inputs = dict[object, float]()
        for linear in linear_layers(shape, layer):
            forward += linear.outputs * (linear.split == "rows")
            gathered += linear.outputs * (linear.split == "gathered")
            backward += linear.inputs * (linear.split == "gathered")
            if linear.split == "columns":
                inputs[linear.place if linear.source is None else linear.source] = linear.inputs
        backward += sum(inputs.values())
        if any(one.split for one in stacked_parameters(shape, layer)):  # of all experts together
            forward += shape.hidden_size
            backward += shape.hidden_size
    by_layer = [total / shape.num_layers for total in (forward, backward, gathered)]
    return SplitValues(by_layer[0], max(0.0, by_layer[0] - shape.hidden_size), by_layer[1], by_layer[2])
