"""Model folders with the names and shapes of a real model's weights but without their bytes: the files are sparse."""

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, WhisperFeatureExtractor
from transformers.core_model_loading import revert_weight_conversion

from tests.zoo.processors import save_processor

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
    "qwen3-8b": ("qwen3", {**QWEN3, "num_hidden_layers": 36}),
    "qwen3-0.6b": (
        "qwen3",
        {
            **QWEN3,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-256k": ("qwen3", {**QWEN3, "vocab_size": 2**18, "hidden_size": 512, "num_hidden_layers": 4}),
    "qwen3-30b-a3b": (
        "qwen3_moe",
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
        "llama",
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
WIDE: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
EXPERTS = {
    "moe_intermediate_size": 1024,
    "num_experts": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 512}
STATES = {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "head_dim": 128}
WALKED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("olmo2", "granite", "phi3", "cohere", "seed_oss", "exaone4", "smollm3", "starcoder2"), WIDE),
    "gpt_neox": {**WIDE, "num_key_value_heads": 16},
    "gemma2": {**WIDE, **WINDOWS, "head_dim": 128},
    "gemma3_text": {**WIDE, **WINDOWS, "head_dim": 128},
    "gpt_oss": {**WIDE, **WINDOWS, "head_dim": 128, "intermediate_size": 1024, "num_local_experts": 16},
    "deepseek_v3": {**WIDE, **EXPERTS, "num_key_value_heads": 16},
    "glm4_moe": {**WIDE, **EXPERTS},
    "olmoe": {**WIDE, **EXPERTS, "intermediate_size": 1024},
    "qwen3_5_text": {**WIDE, **STATES},
    "qwen3_next": {**WIDE, **EXPERTS, **STATES, "shared_expert_intermediate_size": 1024},
    "bamba": {**WIDE, "attn_layer_indices": [1]},
    "lfm2": {**WIDE, "layer_types": ["conv"] * 3 + ["full_attention"]},
}
"""Layer sizes of models whose layers are measured by a walk, by family, which is also the model's name."""
MODELS |= {family: (family, sizes) for family, sizes in WALKED.items()}
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "image_size": 336,
    "patch_size": 14,
}
SEEING: dict[str, tuple[str, dict[str, Any]]] = {
    "llava-7b": (
        "llava",
        {
            "text_config": {
                "model_type": "llama",
                "vocab_size": 32064,
                "hidden_size": 4096,
                "intermediate_size": 11008,
                "num_attention_heads": 32,
                "num_hidden_layers": 32,
                "tie_word_embeddings": False,
            },
            "vision_config": CLIP,
            "image_token_index": 50,
            "vision_feature_layer": -2,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2-audio-7b": (
        "qwen2_audio",
        {
            "text_config": {
                "model_type": "qwen2",
                "vocab_size": 156032,
                "hidden_size": 4096,
                "intermediate_size": 11008,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "num_hidden_layers": 32,
                "tie_word_embeddings": False,
            },
            "audio_config": {"num_mel_bins": 128, "d_model": 1280, "encoder_layers": 32},
            "audio_token_index": 50,
            "tie_word_embeddings": False,
        },
    ),
}
"""Model family and sizes of published models that read media."""
DEPTHS = ("num_hidden_layers", "encoder_layers")
"""Names of the number of layers of a model's part."""


def write_model(folder: Path, name: str, num_layers: int | None = None) -> Path:
    """Write a published model's config, with `num_layers` if given, and an empty weight file; return the folder."""
    folder.mkdir(parents=True)
    family, sizes = SEEING[name] if name in SEEING else MODELS[name]
    shown = {"num_hidden_layers": num_layers} if num_layers else {}
    if name in SEEING:
        _write_processor(folder, family, sizes)
        parts = {part: own for part, own in sizes.items() if num_layers and isinstance(own, dict)}
        for part, own in parts.items():
            sizes = {**sizes, part: own | {name: num_layers for name in DEPTHS if name in own}}
    else:
        sizes = {**sizes, **shown}
    config = AutoConfig.for_model(family, **sizes, dtype="bfloat16")
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = (AutoModelForMultimodalLM if name in SEEING else AutoModelForCausalLM).from_config(config)
    weights = revert_weight_conversion(model, dict(model.state_dict()))
    if config.tie_word_embeddings:
        weights = {key: weight for key, weight in weights.items() if not key.endswith("lm_head.weight")}
    header, end = {}, 0
    for key, weight in weights.items():
        begin, end = end, end + 2 * prod(weight.shape)
        header[key] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def _write_processor(folder: Path, family: str, sizes: dict[str, Any]) -> None:
    """Write the zoo's processor of a family, for media of published towers' sizes."""
    processor, tower, heard = save_processor(family, folder), sizes.get("vision_config", {}), sizes.get("audio_config")
    if side := tower.get("image_size"):
        processor.image_processor.size = {"shortest_edge": side}
        processor.image_processor.crop_size = {"height": side, "width": side}
        processor.patch_size = tower["patch_size"]
    if bins := (heard or {}).get("num_mel_bins"):
        processor.feature_extractor = WhisperFeatureExtractor(feature_size=bins)
    processor.save_pretrained(folder)
