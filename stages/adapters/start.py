"""Puts the numbers of an adapter that was read into a model: into the layers that learn, or into the weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import Tensor

from stages.adapters.adapter import Adapter
from stages.adapters.files import NUM_NAMED, read_adapter
from stages.adapters.lora import ADAPTER_NAME, adapted_layers
from stages.core.errors import ModelError


def read_start(folder: Path, base: Path) -> Adapter:
    """The adapter in `folder`, to train on the model folder `base`. Raises ModelError when it belongs to another."""
    adapter = read_adapter(folder)
    if adapter.base != base.parent.name:
        raise ModelError(
            f"training on from {folder.parent.name}: it is an adapter of {adapter.base or 'no artifact'}, not of "
            f"{base.parent.name}"
        )
    return adapter


def go_on_with(causal_lm: Any, adapter: Adapter) -> None:
    """Give what learns in `causal_lm` the adapter's numbers. Raises ModelError when it has other layers or sizes."""
    given = _parameters(adapter)
    learning = {name: one for name, one in causal_lm.named_parameters() if one.requires_grad}
    odd = set(given) ^ set(learning)
    odd |= {name for name in set(given) & set(learning) if given[name].shape != learning[name].shape}
    if odd:
        raise ModelError(
            f"going on with an adapter: {', '.join(sorted(odd)[:NUM_NAMED])} is not in both it and what `adapter:` "
            "describes, or has another size there; give rank and target_modules that it was trained with, or say "
            "`stack: merge`"
        )
    for layer, module in adapted_layers(causal_lm).items():
        scaling, given_scaling = module.scaling[ADAPTER_NAME], adapter.scaling_of(layer)
        if not math.isclose(scaling, given_scaling):
            raise ModelError(
                f"going on with an adapter that counts {given_scaling:g} times: `adapter:` says {scaling:g} (alpha / "
                f"rank, or alpha / √rank with use_rslora) on {layer}; give those that it was trained with, or say "
                "`stack: merge`"
            )
    for name, parameter in learning.items():
        parameter.data.copy_(given[name])


def merge_into(causal_lm: Any, adapter: Adapter) -> None:
    """Change the model's weights as the merge stage does. Raises ModelError when it does not have them."""
    if adapter.parameters:
        raise ModelError(
            f"merging an adapter, to stack another on it: it changes {next(iter(adapter.parameters.values()))}, and "
            "adapters of parameters are not added up to one of the base; merge it by a stage of `kind: merge`"
        )
    named = dict(causal_lm.named_parameters())
    if lost := sorted(adapter.weights - set(named)):
        raise ModelError(f"merging an adapter: the model has no {', '.join(lost[:NUM_NAMED])}; it is another one's")
    for name in adapter.weights:
        named[name].data = adapter.merged(name, named[name].data).to(named[name].dtype)


def _parameters(adapter: Adapter) -> dict[str, Tensor]:
    """By the names that PEFT gives them in a model."""
    found = dict(adapter.saved)
    for layer, (a, b) in adapter.factors.items():
        if a.ndim > 2:  # of experts, as PEFT has them
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        found[f"{layer}.lora_A.{ADAPTER_NAME}.weight"] = a
        found[f"{layer}.lora_B.{ADAPTER_NAME}.weight"] = b
    for layer, magnitude in adapter.magnitudes.items():
        found[f"{layer}.lora_magnitude_vector.{ADAPTER_NAME}.weight"] = magnitude
    return found
