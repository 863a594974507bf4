"""Which parameters weight decay shrinks: the same as Transformers' Trainer, and so TRL, would choose."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
"""Names, as `Trainer.get_decay_parameter_names` has them; a test compares the two."""


def decayed_parameters(causal_lm: nn.Module) -> set[str]:
    """Names of all parameters but norms and biases."""
    return set(get_parameter_names(causal_lm, [nn.LayerNorm], NOT_DECAYED))


def parameter_groups(
    causal_lm: nn.Module, weight_decay: float, decayed: Collection[str] | None
) -> list[dict[str, Any]]:
    """What torch's optimizers take: the trained parameters of these names (None: all of them) decay, others do not."""
    trained = [(name, parameter) for name, parameter in causal_lm.named_parameters() if parameter.requires_grad]
    chosen = [parameter for name, parameter in trained if decayed is None or name in decayed]
    others = [parameter for name, parameter in trained if decayed is not None and name not in decayed]
    groups = [{"params": chosen, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
