"""Optimizer over a model's parameters: groups by weight decay, learning rate and Muon, and the choice of the class."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from stages.adapters.config import AdapterConfig
from stages.engines.fsdp.adamw import LowPrecisionAdamW
from stages.engines.fsdp.muon import MuonAndAdamW, matrices_of_layers
from stages.engines.settings import EngineSettings, LowPrecisionSettings
from stages.models.loaded_weights import modules_kept_in_fp32

NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Patterns of parameters without weight decay, as in `Trainer.get_decay_parameter_names`; a test compares both."""


def decayed_parameters(causal_lm: nn.Module) -> set[str]:
    """Return the names of all parameters but norms and biases."""
    return set(get_parameter_names(causal_lm, [nn.LayerNorm], NOT_DECAYED))


def parameter_groups(
    causal_lm: nn.Module,
    weight_decay: float,
    decayed: Collection[str] | None,
    adapter: AdapterConfig | None = None,
    matrices: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Return parameter groups for torch's optimizers; parameters named in `decayed` (None: all) decay.

    With LoRA+, B and all vectors learn faster, as in PEFT: `learning_rate_ratio` of a group. matrices: names of those
    that are in groups with `is_muon`.
    """
    ratio = (adapter and adapter.loraplus_lr_ratio) or 1.0
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in causal_lm.named_parameters():
        if parameter.requires_grad:
            decay = weight_decay if decayed is None or name in decayed else 0.0
            is_faster = ".lora_B." in name or parameter.ndim == 1
            kind = decay, ratio if is_faster else 1.0, name in matrices
            groups.setdefault(kind, []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "learning_rate_ratio": times, "is_muon": is_muon}
        for (decay, times, is_muon), parameters in groups.items()
    ]


def hold_in_bf16(causal_lm: nn.Module) -> None:
    """Convert all weights to bf16 before sharding, except those that the architecture keeps in fp32."""
    kept = {id(one) for module in modules_kept_in_fp32(causal_lm, torch.bfloat16) for one in module.parameters()}
    for parameter in causal_lm.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.to(torch.bfloat16)


def build_optimizer(causal_lm: Any, settings: EngineSettings, decayed: Collection[str] | None) -> torch.optim.AdamW:
    """Build AdamW over all trainable parameters, or Muon over the matrices of layers and AdamW over the rest.

    decayed: see `parameter_groups`; it is computed before FSDP2 gives the modules other classes.
    """
    adam, muon = settings.adam, settings.muon
    options: dict[str, Any] = {"lr": adam.learning_rate, "betas": (adam.beta1, adam.beta2), "eps": adam.epsilon}
    matrices = matrices_of_layers(causal_lm) if muon else ()
    groups = parameter_groups(causal_lm, adam.weight_decay, decayed, settings.adapter, matrices)
    if settings.low_precision != LowPrecisionSettings():
        names = {parameter: name for name, parameter in causal_lm.named_parameters()}
        return LowPrecisionAdamW(groups, names, settings.low_precision, settings.seed, **options)
    if muon is None:
        return torch.optim.AdamW(groups, **options, fused=True)
    dtype = torch.float32 if settings.precision == "fp32" else torch.bfloat16
    return MuonAndAdamW(groups, muon, dtype, **options, fused=True)
