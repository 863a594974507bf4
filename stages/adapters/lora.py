"""Puts adapters into a Transformers model, by PEFT: the base is frozen, what learns are A and B of each adapted layer.

Refused by name: targets that match nothing, a rank that a layer does not have, adapters of embeddings and of the head
(servers leave those out without a word), layers that PEFT adapts but whose weights nobody could merge again.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from transformers.pytorch_utils import Conv1D

from stages.adapters.config import AdapterConfig
from stages.core.errors import ModelError
from stages.models.kept_precision import dtype_of_weights

ADAPTER_NAME = "default"
"""PEFT's name for an adapter that has none; part of the names of its parameters."""
NUM_NAMED = 12


def add_adapter(causal_lm: Any, config: AdapterConfig, seed: int) -> LoraConfig:
    """Adapt `causal_lm` in place and freeze all else; returns what PEFT knows the adapter by.

    A is drawn with `seed`, B is 0: the adapted model is the base until it learns. Raises ModelError.
    """
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # a fraction serves as well
        lora_dropout=config.dropout,
        target_modules=list(config.target_modules)
        if isinstance(config.target_modules, tuple)
        else config.target_modules,
        exclude_modules=list(config.exclude_modules) or None,
        layers_to_transform=list(config.layers_to_transform) if config.layers_to_transform is not None else None,
        use_rslora=config.use_rslora,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in causal_lm.modules()),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(lora, causal_lm, ADAPTER_NAME)
        except ValueError as error:
            raise ModelError(_explained(error, causal_lm, config)) from error
    _check(causal_lm, config)
    return lora


def store_frozen_weights(causal_lm: Any, dtype: torch.dtype) -> None:
    """Keep what does not learn in the dtype that it is computed in: the layers would see no more digits."""
    dtype_of = dtype_of_weights(causal_lm, dtype)
    for name, parameter in causal_lm.named_parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype_of(name))


def adapted_layers(causal_lm: nn.Module) -> dict[str, LoraLinear]:
    """Name → layer of all that have an adapter."""
    return {name: module for name, module in causal_lm.named_modules() if isinstance(module, LoraLinear)}


def _check(causal_lm: Any, config: AdapterConfig) -> None:
    layers = adapted_layers(causal_lm)
    odd = [name for name, module in causal_lm.named_modules() if hasattr(module, "lora_A") and name not in layers]
    edges = (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings())
    odd += [name for name, module in layers.items() if any(module is edge for edge in edges)]
    decoder = {id(module) for module in causal_lm.get_decoder().modules()}
    odd += [name for name, module in layers.items() if id(module) not in decoder]
    if odd := list(dict.fromkeys(odd)):
        raise ModelError(
            f"adapter.target_modules is {config.target_modules!r}, which adapts {', '.join(odd[:NUM_NAMED])}: only "
            "linear layers between the embedding and the head can be adapted; leave these out with exclude_modules"
        )
    widths = {name: min(layer.get_base_layer().weight.shape) for name, layer in layers.items()}
    if too_narrow := [f"{name} ({width})" for name, width in widths.items() if width < config.rank]:
        raise ModelError(
            f"adapter.rank is {config.rank}, more than the width of {', '.join(too_narrow[:NUM_NAMED])}; lower it, or "
            "leave these layers out with exclude_modules"
        )


def _explained(error: ValueError, causal_lm: nn.Module, config: AdapterConfig) -> str:
    linear = (nn.Linear, Conv1D)
    ends = sorted({name.rpartition(".")[2] for name, module in causal_lm.named_modules() if isinstance(module, linear)})
    found = str(error).partition(". ")[0]
    return (
        f"putting an adapter on {config.target_modules!r}: {found}; linear layers of {type(causal_lm).__name__} are "
        f"called {', '.join(ends)}"
    )
