"""AdamW parameter groups as Transformers' `Trainer` makes them, for comparisons with plain Transformers."""

from typing import Any

from torch import nn
from transformers import Trainer


def trainer_parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameters with weight decay and those without it, as `Trainer.create_optimizer` groups them."""
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    chosen = [parameter for name, parameter in model.named_parameters() if name in decayed]
    others = [parameter for name, parameter in model.named_parameters() if name not in decayed]
    return [{"params": chosen, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
