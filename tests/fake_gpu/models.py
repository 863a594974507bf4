"""Model folders with the names and shapes of a real model's weights but without their bytes: the files are sparse."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-8b": ("Qwen3", {**QWEN3, "num_hidden_layers": 36}),
    "qwen3-0.6b": (
        "Qwen3",
        {
            **QWEN3,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-30b-a3b": (
        "Qwen3Moe",
        {
            **QWEN3,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_key_value_heads": 4,
            "num_hidden_layers": 48,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
    ),
    "llama3-70b": (
        "Llama",
        {
            **QWEN3,
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_attention_heads": 64,
            "num_hidden_layers": 80,
        },
    ),
}
"""Model family in Transformers and layer sizes of published models, by model name."""


def write_model(folder: Path, name: str, num_layers: int | None = None) -> Path:
    """Write a published model's config, with `num_layers` if given, and an empty weight file; return the folder."""
    family, sizes = MODELS[name]
    sizes = {**sizes, "num_hidden_layers": num_layers or sizes["num_hidden_layers"]}
    config = getattr(transformers, f"{family}Config")(**sizes, dtype="bfloat16")
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    weights = revert_weight_conversion(model, dict(model.state_dict()))
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    header, end = {}, 0
    for key, weight in weights.items():
        begin, end = end, end + 2 * prod(weight.shape)
        header[key] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder
