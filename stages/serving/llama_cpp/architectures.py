"""Which models can be written as GGUF here: types of models whose files were held to Transformers, and what of their
configs llama.cpp would not compute. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""Called so in GGUF, too."""
LANGUAGE_MODEL = "ForCausalLM"
ROTARY = ("default", "llama3")
BLOCK_SIZE = 32
"""Numbers that share a scale, in all formats but f16."""


def config_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """config: the model's `config.json`."""
    if config.get("model_type") not in MODEL_TYPES:
        yield f"its model_type is {config.get('model_type')}; expected {' or '.join(MODEL_TYPES)}"
        return
    if other := [name for name in config.get("architectures") or () if not name.endswith(LANGUAGE_MODEL)]:
        yield f"it is a {', '.join(other)}; expected a language model (…{LANGUAGE_MODEL})"
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotary.get("rope_type") or rotary.get("type") or "default"
    if kind not in ROTARY:
        yield f"its rotary embedding is of type {kind}; expected {' or '.join(ROTARY)}"
    if config.get("use_sliding_window"):
        yield "it attends to a sliding window (use_sliding_window)"
    if config.get("hidden_act", "silu") != "silu":
        yield f"its activation is {config['hidden_act']}; expected silu"
    if config.get("mlp_bias"):
        yield "its feed-forward layers have biases (mlp_bias)"
