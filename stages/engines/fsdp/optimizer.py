"""Which parameters weight decay shrinks: the same as Transformers' Trainer, and so TRL, would choose."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from stages.adapters.config import AdapterConfig

NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Names, as `Trainer.get_decay_parameter_names` has them; a test compares the two."""


def decayed_parameters(causal_lm: nn.Module) -> set[str]:
    """Names of all parameters but norms and biases."""
    return set(get_parameter_names(causal_lm, [nn.LayerNorm], NOT_DECAYED))


def parameter_groups(
    causal_lm: nn.Module,
    weight_decay: float,
    decayed: Collection[str] | None,
    adapter: AdapterConfig | None = None,
) -> list[dict[str, Any]]:
    """What torch's optimizers take: the trained parameters of these names (None: all of them) decay, others do not.

    With LoRA+, B and all vectors learn faster, as PEFT has it: `learning_rate_ratio` of a group.
    """
    ratio = (adapter and adapter.loraplus_lr_ratio) or 1.0
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in causal_lm.named_parameters():
        if parameter.requires_grad:
            decay = weight_decay if decayed is None or name in decayed else 0.0
            is_faster = ".lora_B." in name or parameter.ndim == 1
            groups.setdefault((decay, ratio if is_faster else 1.0), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "learning_rate_ratio": times}
        for (decay, times), parameters in groups.items()
    ]
