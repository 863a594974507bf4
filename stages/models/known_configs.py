"""Configs of published models by name, for families that only a walk can measure (`walked`); needs no torch.

`CONFIGS` has each model's source and number of parameters: of models that see, those of `known_vision`, with the tower;
here those of the text part, without multi-token prediction. What a config leaves out is Transformers' default.
"""

from typing import Any

from stages.models.facts import ModelFacts
from stages.models.known_models import PublishedConfig, longest_match
from stages.models.known_vision import SEEING

_FULL, _LINEAR = "full_attention", "linear_attention"
_NEMOTRON = {"M": "mamba", "E": "moe", "*": "attention"}
"""Kinds of Nemotron-H's layers, by the letters of its patterns."""


def _sizes(family: str, layers: int, hidden: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "model_type": family, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }  # fmt: skip


def _granite4(hidden: int, heads: int, kv_heads: int, mamba_heads: int, **others: int) -> dict[str, Any]:
    return _sizes("granitemoehybrid", 40, hidden, heads, kv_heads) | {
        "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
        "mamba_n_heads": mamba_heads, "mamba_d_head": 2 * hidden // mamba_heads, "mamba_d_state": 128,
        "vocab_size": 100352, "tie_word_embeddings": True, "position_embedding_type": "nope", **others,
    }  # fmt: skip


_HUB = "the hub's count of the tensors of"
_MAXTEXT = "github.com/AI-Hypercomputer/maxtext: hf_model_configs.py"
_CARD_GRANITE = "github.com/DocDBrown/IBMGranite4Tiny README.md (IBM's card)"

CONFIGS = {
    **SEEING,
    "qwen3 next 80b": PublishedConfig(
        {"model_type": "qwen3_next"}, 79_674_391_296,
        f"Transformers' Qwen3NextConfig; {_MAXTEXT}; {_HUB} Qwen/Qwen3-Coder-Next, which has the same config",
    ),
    "glm 5": PublishedConfig(
        {"model_type": "glm_moe_dsa"}, 744e9,
        f"Transformers' GlmMoeDsaConfig; {_MAXTEXT}; glennklockwood.com/garden/GLM-5 (744B)",
    ),
    "glm 4.7 flash": PublishedConfig(
        {"model_type": "glm4_moe_lite"}, 29.9e9,
        "Transformers' Glm4MoeLiteConfig; ollama.com/library/glm-4.7-flash (29.9B)",
    ),
    "glm 4.5 air": PublishedConfig(
        _sizes("glm4_moe", 46, 4096, 96, 8) | {"head_dim": 128}, 106_852_251_264,
        "Transformers' Glm4MoeConfig; github.com/zai-org/GLM-4.5 README.md (106B); "
        f"{_HUB} PrimeIntellect/INTELLECT-3, trained from it (arXiv 2512.16144) without its MTP layer",
    ),
    "kimi k2": PublishedConfig(
        _sizes("deepseek_v3", 61, 7168, 64, 64) | {
            "first_k_dense_replace": 1, "n_routed_experts": 384, "n_group": 1, "topk_group": 1, "vocab_size": 163840,
        }, 1_026_408_232_448,
        f"github.com/AI-Hypercomputer/maxtext: kimi-k2-1t.yml; {_HUB} moonshotai/Kimi-K2-Instruct",
    ),
    "lfm2 1.2b": PublishedConfig(
        _sizes("lfm2", 16, 2048, 32, 8) | {
            "block_ff_dim": 12288, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "vocab_size": 65536
        }, 1_170_340_608, "deepwiki.com/kreasof-ai/OpenFormer; aifasthub.com/LiquidAI/LFM2-1.2B (card)",
    ),
    "lfm2 8b": PublishedConfig(
        _sizes("lfm2_moe", 24, 2048, 32, 8) | {
            "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_experts": 32, "num_experts_per_tok": 4,
            "num_dense_layers": 2, "vocab_size": 65536, "tie_word_embeddings": True,
            "layer_types": [_FULL if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
        }, 8.3e9,
        "github.com/lablup/mlxcel (config of LFM2-8B-A1B); kiadev.net/news/2025-10-11-lfm2-8b-a1b-on-device-moe (8.3B)",
    ),
    "nemotron3 nano 30b": PublishedConfig(
        _sizes("nemotron_h", 52, 2688, 32, 2) | {
            "layers_block_type": [
                _NEMOTRON[letter] for letter in "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
            ],
            "mamba_num_heads": 64, "mamba_head_dim": 64, "n_routed_experts": 128, "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
        }, 31.6e9, "github.com/THUDM/slime scripts/models/nemotron-nano-30B-A3B.sh; "
        "huggingface.co/basecompute/NVIDIA-Nemotron-3-Nano-30B-A3B (31.6B)",
    ),
    "ernie 4.5 21b": PublishedConfig(
        {"model_type": "ernie4_5_moe"}, 21.83e9,
        "Transformers' Ernie4_5_MoeConfig; apxml.com/models/ernie-45-21b-a3b (21B); llama.cpp's llama-bench (21.83 B)",
    ),
    "ernie 4.5 300b": PublishedConfig(
        _sizes("ernie4_5_moe", 54, 8192, 64, 8) | {
            "intermediate_size": 28672, "moe_intermediate_size": 3584, "moe_num_experts": 64, "moe_k": 8,
            "moe_num_shared_experts": 0, "moe_layer_start_index": 3,
        }, 300e9, "Huawei's atb_llm test_router_ernie_moe.py; apxml.com/models/ernie-45-300b-a47b (300 billion)",
    ),
    "minimax text 01": PublishedConfig(
        _sizes("minimax", 80, 6144, 64, 8) | {
            "head_dim": 128, "num_local_experts": 32, "intermediate_size": 9216, "vocab_size": 200064,
            "layer_types": [*[_LINEAR] * 7, _FULL] * 10,
        }, 456e9, "minimax01.com/en/blog/minimax-text-01-introduction",
    ),
    "granite4.0 h tiny": PublishedConfig(
        _granite4(
            1536, 12, 4, 48, intermediate_size=512, shared_intermediate_size=1024, num_local_experts=64,
            num_experts_per_tok=6,
        ), 6.94e9, _CARD_GRANITE,
    ),
    "granite4.0 h small": PublishedConfig(
        _granite4(
            4096, 32, 8, 128, intermediate_size=768, shared_intermediate_size=1536, num_local_experts=72,
            num_experts_per_tok=10,
        ), 32.21e9, f"{_CARD_GRANITE}; hub.docker.com/r/ai/granite-4.0-h-small (32.21 B)",
    ),
    "exaone 4.0 32b": PublishedConfig(
        _sizes("exaone4", 64, 5120, 40, 8) | {"intermediate_size": 27392, "sliding_window": 4096}, 32.0e9,
        "config.json of LGAI-EXAONE/EXAONE-3.5-32B-Instruct-AWQ; github.com/LG-AI-EXAONE/EXAONE-4.0 README.md (32.0B)",
    ),
    "hunyuan a13b": PublishedConfig(
        _sizes("hunyuan_v1_moe", 32, 4096, 32, 8) | {
            "head_dim": 128, "intermediate_size": 3072, "num_experts": 64, "moe_topk": 8, "num_shared_expert": 1,
            "vocab_size": 128167, "tie_word_embeddings": True,
        }, 80e9, "apxml.com/models/hunyuan-a13b",
    ),
    "olmo3 7b": PublishedConfig(
        _sizes("olmo3", 32, 4096, 32, 32) | {"intermediate_size": 11008, "vocab_size": 100278}, 7.3e9, _MAXTEXT
    ),
}  # fmt: skip
"""Configs of published models with their sources, by the words that a model's name must contain."""


def known_config(name: str) -> ModelFacts | None:
    """Return the facts of the published model that `name` mentions (`Qwen3-VL-8B`), by its config, or None."""
    found = longest_match(name, CONFIGS)
    return ModelFacts(CONFIGS[found].config) if found else None
