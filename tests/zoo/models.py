"""Tiny models with random weights, made offline: one of each family in `text.py` and `media.py`."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from tests.zoo.media import HEARING_FAMILIES, MEDIA_FAMILIES
from tests.zoo.text import TEXT_FAMILIES

FAMILIES = {**TEXT_FAMILIES, **MEDIA_FAMILIES}


def tiny_config(family: str, **fields: Any) -> PreTrainedConfig:
    """Return the config of a family's tiny model, with other values of some fields."""
    # A copy: a config of a model that sees writes into that of its text.
    return AutoConfig.for_model(family, **deepcopy({**(FAMILIES | HEARING_FAMILIES)[family], **fields}))


def tiny_model(family: str, **fields: Any) -> PreTrainedModel:
    """Return a family's tiny model with random weights, also of norms, since scaling errors would not show with 1."""
    torch.manual_seed(0)
    config = tiny_config(family, **fields)
    auto_class: Any = AutoModelForCausalLM if family in TEXT_FAMILIES else AutoModelForMultimodalLM
    model: PreTrainedModel = auto_class.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                parameter.mul_(4)
    return model.eval()


def load(folder: Path) -> Any:
    """Return a folder's model as Transformers' plain matrix products compute it, in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
