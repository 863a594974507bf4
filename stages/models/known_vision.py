"""Configs of published models that see, by name, with their vision towers; needs no torch.

`SEEING` has each model's source and number of parameters, those of the tower included. The sizes of layers are measured
by a walk (`walked`), as of a model whose files are there.
"""

from typing import Any

from stages.models.known_models import PublishedConfig


def _qwen2_5_vl(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> dict[str, Any]:
    text = _text("qwen2_5_vl_text", layers, hidden, heads, kv_heads) | {"intermediate_size": ffn, "vocab_size": 152064}
    tower = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": hidden}
    return {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": tower, "tie_word_embeddings": False}


def _qwen3_vl(text: dict[str, Any], tower: dict[str, Any], *, tied: bool = False, kind: str = "") -> dict[str, Any]:
    text = {**text, "model_type": f"qwen3_vl{kind}_text", "head_dim": 128, "vocab_size": 151936}
    tower = {"patch_size": 16, "num_heads": 16, "out_hidden_size": text["hidden_size"], **tower}
    return {"model_type": f"qwen3_vl{kind}", "text_config": text, "vision_config": tower, "tie_word_embeddings": tied}


def _gemma3(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    text = _text("gemma3_text", layers, hidden, heads, kv_heads)
    text |= {"head_dim": head_dim, "intermediate_size": 4 * hidden, "sliding_window": 1024, "vocab_size": 262208}
    tower = {
        "model_type": "siglip_vision_model", "num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304,
        "num_attention_heads": 16, "image_size": 896, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    return {"model_type": "gemma3", "text_config": text, "vision_config": tower, "tie_word_embeddings": True}


def _text(family: str, layers: int, hidden: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": family, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }  # fmt: skip


def _llama4(**text: int) -> dict[str, Any]:
    tower = {
        "hidden_size": 1408, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16,
        "image_size": 336, "patch_size": 14, "vision_output_dim": 4096,
    }  # fmt: skip
    return {"model_type": "llama4", "text_config": {"model_type": "llama4_text", **text}, "vision_config": tower}


_LARGE = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
_SMALL = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
_TITAN = "github.com/pytorch/torchtitan experiments/qwen3_vl/__init__.py"
_LLAMA4 = "Transformers' Llama4TextConfig; github.com/AI-Hypercomputer/maxtext: configs/models/llama4-17b-"
_GEMMA3 = "github.com/AI-Hypercomputer/maxtext hf_model_configs.py, Transformers' Gemma3Config (vocabulary); keras-hub"
_GEMMA3 += " gemma3_presets.py"

SEEING = {
    "qwen2.5 vl 7b": PublishedConfig(
        _qwen2_5_vl(28, 3584, 28, 4, 18944), 8_292_166_656,
        "github.com/acproject/duorou docs/qwen2.5vl_graph.md (its layers printed); huggingface.co/Alibaba-NLP/GVE-7B",
    ),
    "qwen3 vl 2b": PublishedConfig(
        _qwen3_vl(_text("", 28, 2048, 16, 8) | {"intermediate_size": 6144}, _SMALL, tied=True), 2_127_532_032, _TITAN
    ),
    "qwen3 vl 8b": PublishedConfig(
        _qwen3_vl(_text("", 36, 4096, 32, 8) | {"intermediate_size": 12288}, _LARGE), 8_767_123_696,
        f"{_TITAN}; huggingface.co/Qwen/Qwen3-VL-8B-Instruct (8.77B)",
    ),
    "llama4 scout": PublishedConfig(_llama4(), 109e9, f"{_LLAMA4}16e.yml; hackmd.io/@Ibi/Sy7i4gMRkx (109B)"),
    "llama4 maverick": PublishedConfig(
        _llama4(num_local_experts=128, interleave_moe_layer_step=2), 400e9,
        f"{_LLAMA4}128e.yml; hackmd.io/@Ibi/Sy7i4gMRkx (400B)",
    ),
    "gemma3 4b": PublishedConfig(_gemma3(34, 2560, 8, 4, 256), 4_300_079_472, _GEMMA3),
    "gemma3 12b": PublishedConfig(_gemma3(48, 3840, 16, 8, 256), 12_187_079_280, _GEMMA3),
    "gemma3 27b": PublishedConfig(_gemma3(62, 5376, 32, 16, 128), 27_432_062_576, _GEMMA3),
}  # fmt: skip
"""Configs of published models that see with their sources, by the words that a model's name must contain."""
