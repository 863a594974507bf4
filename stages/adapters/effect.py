"""Effect of an adapter on model files: merged weights, and layers or experts that the adapter leaves as they were.

A parameter of experts is [experts, out, in], or [experts, in, out] where its module says `is_transposed`; most files
hold each expert, and gate and up, by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from stages.adapters.adapter import Adapter
from stages.core.errors import ModelError
from stages.models.weight_files import weight_paths

NUM_NAMED = 5
KEPT_CHANGES = 2
"""Cached stacked-expert parameters' changes; two, since files hold an expert's gate, up and down side by side."""


class ChangedParameters:
    """Changes of an adapter to parameters outside linear layers (stacked experts), by weight name in model files."""

    def __init__(self, adapter: Adapter, causal_lm: Any) -> None:
        """Map the adapter's parameters outside linear layers to weights in files; ModelError for missing ones."""
        self._adapter = adapter
        self._causal_lm = causal_lm
        shapes = {name: tuple(one.shape) for name, one in causal_lm.named_parameters()}
        if lost := sorted(set(adapter.parameters.values()) - set(shapes)):
            raise ModelError(
                f"the adapter is of {', '.join(lost[:NUM_NAMED])}, which {type(causal_lm).__name__} does not have; "
                "they do not belong together"
            )
        self.layers = {
            stored: layer
            for layer, name in adapter.parameters.items()
            for stored in stored_names(causal_lm, name, shapes[name])
        }
        """Name of the LoRA layer that changes a weight, by the weight's name in the model's files."""
        # a cache of this object, freed with it; a decorator's would hold every adapter
        self._changes = lru_cache(KEPT_CHANGES)(self._changes_of)

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight of the base's files with the adapter's change, fp32; ModelError for another shape."""
        change = self._changes(self.layers[name])[name]
        if change.shape != weight.shape:
            raise ModelError(
                f"merging {name}: the adapter changes a weight of {tuple(change.shape)}, the model's is "
                f"{tuple(weight.shape)}; they do not belong together"
            )
        return weight.float() + change

    def _changes_of(self, layer: str) -> dict[str, Tensor]:
        name = self._adapter.parameters[layer]
        change = self._adapter.change(layer)
        module = self._causal_lm.get_submodule(name.rpartition(".")[0])
        if change.ndim == 3 and getattr(module, "is_transposed", False):
            change = change.transpose(1, 2)
        # Transformers' own way from loaded to stored names, such as stacked experts to one weight an expert
        return revert_weight_conversion(self._causal_lm, {name: change.contiguous()})


def stored_names(causal_lm: Any, parameter: str, shape: tuple[int, ...]) -> list[str]:
    """Return the names of the tensors in a model's files that make up one of the loaded model's parameters."""
    # Only names are wanted: a tensor on `meta` has a shape and takes no memory.
    return list(revert_weight_conversion(causal_lm, {parameter: torch.empty(shape, device="meta")}))


@dataclass(frozen=True)
class RenamedWeights:
    """Changes of an adapter to weights that have other names in a model's files than in Transformers' model."""

    adapter: Adapter
    loaded: Mapping[str, str]
    """Name of each weight in Transformers' model, by its name in the files."""

    @classmethod
    def of(cls, adapter: Adapter, causal_lm: Any) -> RenamedWeights:
        """Return the changes of an adapter's linear layers and whole modules to the weights in the model's files.

        Raises ModelError for a layer that the files do not hold as one weight.
        """
        loaded: dict[str, str] = {}
        for name in sorted(adapter.weights):
            stored = stored_names(causal_lm, name, tuple(adapter.shape_of(name)))
            if len(stored) != 1:
                raise ModelError(
                    f"merging {name}: the model's files hold it as {', '.join(stored[:NUM_NAMED])}, and only whole "
                    "weights are merged; train an adapter without it (`exclude_modules`)"
                )
            loaded[stored[0]] = name
        return cls(adapter, loaded)

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight of the base's files with the adapter's change, fp32; ModelError for another shape."""
        return self.adapter.merged(self.loaded[name], weight)


Changing = Mapping[str, Adapter | ChangedParameters | RenamedWeights]
"""Source of each weight's change in a merge, by its name in files."""


def changing(adapter: Adapter, causal_lm: Any | None = None) -> Changing:
    """Return the source of each weight's change in a merge.

    causal_lm: Transformers' model, with or without weights; None if only linear layers change, and files call them as
    the model does.
    """
    if causal_lm is None:
        return dict.fromkeys(adapter.weights, adapter)
    parameters, renamed = ChangedParameters(adapter, causal_lm), RenamedWeights.of(adapter, causal_lm)
    return {**dict.fromkeys(parameters.layers, parameters), **dict.fromkeys(renamed.loaded, renamed)}


def merged_weight(changes: Changing, name: str, weight: Tensor) -> Tensor:
    """Return a base model's weight, merged if an adapter changes it, in the weight's own dtype."""
    return changes[name].merged(name, weight).to(weight.dtype).contiguous() if name in changes else weight


def has_effect(trained: Changing, start: Changing, base: Path) -> bool:
    """Return whether merging the trained adapter gives other weights than the start one, up to the first difference."""
    for path in weight_paths(base):
        with safe_open(path, framework="pt") as file:
            for name in {*trained, *start} & set(file.keys()):
                weight = file.get_tensor(name)
                # in the dtype of the file, where a small change may be rounded away
                if not torch.equal(merged_weight(trained, name, weight), merged_weight(start, name, weight)):
                    return True
    return False


def idle_layers(adapter: Adapter) -> list[str]:
    """Return linear layers whose LoRA B is all 0: no gradient reached them, or the change was lost in rounding."""
    return sorted(layer for layer in adapter.layers if not adapter.factors[layer][1].any())


def idle_experts(adapter: Adapter) -> str | None:
    """Return a warning about experts whose adapters add nothing, since no token was routed to them; else None."""
    counts = [
        # of B [experts, out, rank]: experts whose numbers are all 0, and all experts
        (b.flatten(1).any(1).logical_not().sum().item(), len(b))
        for _, b in adapter.factors.values()
        if b.ndim > 2
    ]
    idle, everyone = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    if not idle:
        return None
    return (
        f"{idle:,.0f} of {everyone:,} adapters of experts have learned nothing: no training token was routed to these "
        "experts; they stay as they are in the base"
    )


def split_experts(factor: Tensor, num_experts: int, name: str) -> Tensor:
    """Split a LoRA factor that holds all experts of a layer by expert.

    A [experts × rank, in] becomes [experts, rank, in], B [out, rank × experts] becomes [experts, out, rank].
    """
    if name == "A":
        return factor.unflatten(0, (num_experts, -1))
    # [out, rank, experts] → [experts, out, rank]: in PEFT's B the expert's number varies fastest.
    return factor.unflatten(1, (-1, num_experts)).permute(2, 0, 1)


def join_experts(factors: Tensor, name: str) -> Tensor:
    """Join the LoRA factors of a layer's experts into the one tensor that PEFT stores. Inverse of `split_experts`."""
    return factors.flatten(0, 1) if name == "A" else factors.permute(1, 2, 0).flatten(1)
