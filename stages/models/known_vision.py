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


def _qwen3_5(text: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    family = "qwen3_5_moe" if "moe" in text["model_type"] else "qwen3_5"
    tower = {"patch_size": 16, "num_heads": 16, **tower, "deepstack_visual_indexes": []}
    tied = text.get("tie_word_embeddings", False)
    return {"model_type": family, "text_config": text, "vision_config": tower, "tie_word_embeddings": tied}


def _qwen3_5_text(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> dict[str, Any]:
    return _text("qwen3_5_text", layers, hidden, heads, kv_heads) | {"intermediate_size": ffn}


def _gemma4(text: dict[str, Any], tower: dict[str, Any], *, period: int = 6, hears: bool = False) -> dict[str, Any]:
    kinds = [*["sliding_attention"] * (period - 1), "full_attention"] * (text["num_hidden_layers"] // period)
    text = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, **text, "layer_types": kinds}
    tower = {"model_type": "gemma4_vision", "patch_size": 16, "pooling_kernel_size": 3, **tower}
    audio = {"model_type": "gemma4_audio"} if hears else None
    config = {"model_type": "gemma4", "text_config": text, "vision_config": tower, "audio_config": audio}
    return {**config, "tie_word_embeddings": True}


def _gemma4_large(layers: int, hidden: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    text = _text("gemma4_text", layers, hidden, heads, kv_heads)
    tower = {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "head_dim": 72, "standardize": True, "use_clipped_linears": False,
    }  # fmt: skip
    return _gemma4(text | {"attention_k_eq_v": True, "sliding_window": 1024, **others}, tower)


def _gemma4_small(layers: int, hidden: int, kv_heads: int, period: int, **others: Any) -> dict[str, Any]:
    text = _text("gemma4_text", layers, hidden, 8, kv_heads)
    tower = {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
        "num_key_value_heads": 12, "head_dim": 64, "standardize": False, "use_clipped_linears": True,
    }  # fmt: skip
    return _gemma4(text | {"hidden_size_per_layer_input": 256, **others}, tower, period=period, hears=True)


_LARGE = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
_SMALL = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
_TITAN = "github.com/pytorch/torchtitan experiments/qwen3_vl/__init__.py"
_LLAMA4 = "Transformers' Llama4TextConfig; github.com/AI-Hypercomputer/maxtext: configs/models/llama4-17b-"
_GEMMA3 = "github.com/AI-Hypercomputer/maxtext hf_model_configs.py, Transformers' Gemma3Config (vocabulary); keras-hub"
_GEMMA3 += " gemma3_presets.py"
_MAXTEXT = "github.com/AI-Hypercomputer/maxtext hf_model_configs.py"
_GEMMA4_CARD = "huggingface.co/zeromodels/gemma-4-e4b-it (Google's card"
_KERAS = "github.com/keras-team/keras-hub qwen3_5_presets.py, qwen3_5_moe_presets.py (parameters)"
_TEXT_27B = _qwen3_5_text(64, 5120, 24, 4, 17408) | {"linear_num_value_heads": 48}
_TEXT_35B = {"model_type": "qwen3_5_moe_text", "hidden_size": 2048}

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
    "qwen3.5 4b": PublishedConfig(
        _qwen3_5(
            _qwen3_5_text(32, 2560, 16, 4, 9216) | {"tie_word_embeddings": True}, {**_SMALL, "out_hidden_size": 2560}
        ), 4_539_265_536, f"github.com/radixark/miles scripts/models/qwen3.5-4B.sh; {_KERAS}",
    ),
    "qwen3.5 9b": PublishedConfig(
        _qwen3_5({"model_type": "qwen3_5_text"}, {**_LARGE, "out_hidden_size": 4096}), 9_409_813_744,
        f"Transformers' Qwen3_5TextConfig; apxml.com/models/qwen35-9b; {_KERAS}",
    ),
    "qwen3.5 27b": PublishedConfig(
        _qwen3_5(_TEXT_27B, {**_LARGE, "out_hidden_size": 5120}), 27_356_728_560,
        f"github.com/THUDM/slime scripts/models/qwen3.5-27B.sh; {_KERAS}",
    ),
    "qwen3.6 27b": PublishedConfig(
        _qwen3_5(_TEXT_27B, {**_LARGE, "out_hidden_size": 5120}), 27_356_728_560,
        f"67ailab.com/posts/qwen36-27b-deep-dive-architecture-efficiency; {_KERAS}, those of Qwen3.5 27B",
    ),
    "qwen3.5 35b": PublishedConfig(
        _qwen3_5(_TEXT_35B, {**_LARGE, "out_hidden_size": 2048}), 35_107_181_936,
        f"Transformers' Qwen3_5MoeTextConfig; {_KERAS}",
    ),
    "qwen3.6 35b": PublishedConfig(
        _qwen3_5(_TEXT_35B, {**_LARGE, "out_hidden_size": 2048}), 35_107_181_936,
        f"Transformers' Qwen3_5MoeTextConfig; {_KERAS}",
    ),
    "qwen3.5 397b": PublishedConfig(
        _qwen3_5(
            _text("qwen3_5_moe_text", 60, 4096, 32, 2) | {
                "linear_num_value_heads": 64, "num_experts": 512, "num_experts_per_tok": 10,
                "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024,
            }, {**_LARGE, "out_hidden_size": 4096},
        ), 397e9, f"{_MAXTEXT}; github.com/xorbitsai/inference builtin/llm/qwen3.5.rst (397 billion)",
    ),
    "gemma4 e2b": PublishedConfig(
        _gemma4_small(
            35, 1536, 1, 5, intermediate_size=6144, num_kv_shared_layers=20, use_double_wide_mlp=True
        ), 5.1e9, f"{_MAXTEXT}; {_GEMMA4_CARD}: 5.1B with embeddings); keras-hub gemma4_presets.py",
    ),
    "gemma4 26b": PublishedConfig(
        _gemma4_large(
            30, 2816, 16, 8, num_global_key_value_heads=2, intermediate_size=2112, enable_moe_block=True,
            num_experts=128, top_k_experts=8, moe_intermediate_size=704,
        ), 25.2e9 + 0.55e9, f"{_MAXTEXT}; andysmith.ai/wiki/gemma-4-model-card (25.2B, vision 550M)",
    ),
    "gemma4 31b": PublishedConfig(
        _gemma4_large(60, 5376, 32, 16, num_global_key_value_heads=4, intermediate_size=21504), 30.7e9 + 0.55e9,
        f"{_MAXTEXT}; {_GEMMA4_CARD}: 30.7B, vision ~550M)",
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
