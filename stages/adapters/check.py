"""Whether a model can have the adapter that a recipe describes: found in seconds, without a weight being read or made.

The model is built of its config on the meta device; names of weights are those in the headers of its files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stages.adapters.config import AdapterConfig
from stages.adapters.files import check_mergeable
from stages.adapters.lora import add_adapter, changed_weights
from stages.adapters.quantized import quantizable_layers


def check_adapter(causal_lm: Any, config: AdapterConfig, folder: Path) -> None:
    """Put the adapter on a model that has no weights. Raises ModelError, as training would.

    folder: of a model with files that have the same names of weights.
    """
    add_adapter(causal_lm, config, seed=0, has_weights=False)
    check_mergeable(changed_weights(causal_lm), folder)
    if config.base_precision in ("nf4", "int8"):
        quantizable_layers(causal_lm, config.base_precision)


def model_without_weights(folder: Path, *, trust_remote_code: bool) -> Any:
    """On the meta device. Raises what Transformers raises for a config of which it can make no model."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
