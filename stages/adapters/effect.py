"""Effect of a trained adapter: whether anything of it is left once it is added to its base's weights in their dtype."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from stages.adapters.adapter import Adapter
from stages.adapters.experts import ChangedParameters
from stages.models.weight_files import weight_paths

Changing = Mapping[str, Adapter | ChangedParameters]
"""Name of a weight in the files of a model → what changes it."""


def changing(adapter: Adapter, parameters: ChangedParameters | None) -> Changing:
    """Return what changes each weight. parameters: of an adapter that changes more than linear layers."""
    of_parameters: Changing = dict.fromkeys(parameters.layers, parameters) if parameters else {}
    return {**of_parameters, **dict.fromkeys(adapter.weights, adapter)}


def merged_weight(changes: Changing, name: str, weight: Tensor) -> Tensor:
    """Return a weight of the base, merged and rounded to the dtype that it has in its file."""
    return changes[name].merged(name, weight).to(weight.dtype).contiguous() if name in changes else weight


def has_effect(trained: Changing, start: Changing, base: Path) -> bool:
    """Return whether merging makes at least one element of a weight of `base` another number than merging `start` does.

    start: the adapter that training went on from; empty without one. Reads weights up to the first that differs.
    """
    for path in weight_paths(base):
        with safe_open(path, framework="pt") as file:
            for name in {*trained, *start} & set(file.keys()):
                weight = file.get_tensor(name)
                if not torch.equal(merged_weight(trained, name, weight), merged_weight(start, name, weight)):
                    return True
    return False


def idle_layers(adapter: Adapter) -> list[str]:
    """Return the linear layers whose B is all 0: no gradient reached them, or its change was lost in rounding."""
    return sorted(layer for layer in adapter.layers if not adapter.factors[layer][1].any())
