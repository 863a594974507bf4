"""Sizes of published models by name, for tables that name a model without its sizes; needs no torch.

`PUBLISHED` has each model's source and number of parameters; the others are from papers and configs. DeepSeek's shared
experts are written as so many more that every token is routed to (without multi-token prediction); attention over a
window in some layers (Gemma, GPT OSS, EXAONE 4) as attention over the whole row; of models that see, the text part.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stages.models.shape import LatentAttention, ModelShape


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> ModelShape:
    return ModelShape(layers, hidden, heads, kv_heads, hidden // heads, ffn, vocab)


def _qwen2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> ModelShape:
    return replace(_llama(layers, hidden, heads, kv_heads, ffn, vocab), family="qwen2", qkv_bias=True)


def _qwen3(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> ModelShape:
    return ModelShape(layers, hidden, heads, kv_heads, 128, ffn, 151936, family="qwen3", qk_norm=True)


def _mixture(base: ModelShape, experts: int, active: int, width: int) -> ModelShape:
    return replace(base, num_experts=experts, experts_per_token=active, expert_ffn_size=width)


def gpt(layers: int, hidden: int, heads: int, vocab: int) -> ModelShape:
    """Return the sizes of a GPT model as in Megatron's papers: LayerNorm, GELU, tied embeddings."""
    return ModelShape(
        layers, hidden, heads, heads, hidden // heads, 4 * hidden, vocab, family="gpt2", tied_embeddings=True,
        gated_ffn=False, qkv_bias=True, output_bias=True, ffn_bias=True, norm_bias=True, has_split_plan=False,
    )  # fmt: skip


_LATENT = LatentAttention(query_rank=1536, kv_rank=512, rotary_dim=64)
_DEEPSEEK_V2 = ModelShape(60, 5120, 128, 128, 128, 12288, 102400, dense_layers=frozenset({0}), latent=_LATENT)
_DEEPSEEK_V3 = ModelShape(61, 7168, 128, 128, 128, 18432, 129280, dense_layers=frozenset({0, 1, 2}), latent=_LATENT)


@dataclass(frozen=True)
class Published:
    """Sizes of a published model, its published number of parameters, and where both are stated."""

    shape: ModelShape
    parameters: float
    source: str


@dataclass(frozen=True)
class PublishedConfig:
    """Config of a published model, its published number of parameters, and where both are stated.

    The sizes of its layers are measured by a walk (`walked`), as of a model whose files are there.
    """

    config: Mapping[str, Any]
    parameters: float
    source: str


def _tied(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int) -> ModelShape:
    return ModelShape(layers, hidden, heads, kv_heads, head_dim, ffn, vocab, tied_embeddings=True)


def _gpt_oss(layers: int, experts: int) -> ModelShape:
    base = ModelShape(layers, 2880, 64, 8, 64, 2880, 201088, has_split_plan=False)
    return _mixture(base, experts, 4, 2880)


_GEMMA = "github.com/google/gemma_pytorch gemma/config.py; keras-hub gemma_presets.py"
_GPT_OSS = "docs.nvidia.com/nemo: megatron-bridge gpt-oss (sizes), microservices gpt-oss (117B, 21B)"
_LLAMA32 = "config.json of Llama-3.2 (mlx-community, bert4torch_config); llama-models llama3_2/MODEL_CARD.md"

PUBLISHED = {
    "gpt oss 20b": Published(_gpt_oss(24, 32), 21e9, _GPT_OSS),
    "gpt oss 120b": Published(_gpt_oss(36, 128), 117e9, _GPT_OSS),
    "gemma 2b": Published(_tied(18, 2048, 8, 1, 256, 16384, 256000), 2_506_172_416, _GEMMA),
    "gemma 7b": Published(_tied(28, 3072, 16, 16, 256, 24576, 256000), 8_537_680_896, _GEMMA),
    "gemma2 2b": Published(
        _tied(26, 2304, 8, 4, 256, 9216, 256000), 2_614_341_888,
        "Transformers' Gemma2Config; keras-hub gemma_presets.py",
    ),
    "gemma2 9b": Published(_tied(42, 3584, 16, 8, 256, 14336, 256000), 9_241_705_984, _GEMMA),
    "gemma2 27b": Published(_tied(46, 4608, 32, 16, 128, 36864, 256000), 27_227_128_320, _GEMMA),
    "gemma3 1b": Published(
        replace(_tied(26, 1152, 4, 1, 256, 6912, 262144), qk_norm=True), 999_885_952,
        "config.json of CodeAtCMU/gemma-3-1b-pt_…; keras-hub gemma3_presets.py",
    ),
    "gemma3 4b": Published(
        replace(_tied(34, 2560, 8, 4, 256, 10240, 262208), qk_norm=True), 3.209e9 + 0.675e9,
        "config.json of Creekside/gemma-3; Gemma 3 technical report, table 1 (text and embedding)",
    ),
    "gemma3 27b": Published(
        replace(_tied(62, 5376, 32, 16, 128, 21504, 262208), qk_norm=True), 25.6e9 + 1.416e9,
        "ollama.com jwang580/medgemma_27b_q8_0 (metadata); Gemma 3 technical report, table 1 (text and embedding)",
    ),
    "llama3.2 1b": Published(_tied(16, 2048, 32, 8, 64, 8192, 128256), 1.23e9, _LLAMA32),
    "llama3.2 3b": Published(_tied(28, 3072, 24, 8, 128, 8192, 128256), 3.21e9, _LLAMA32),
    "smollm3 3b": Published(
        _tied(36, 2048, 16, 4, 128, 11008, 128256), 3.08e9, "Transformers' SmolLM3Config; aibase.com/news/19552 (3.08B)"
    ),
    "seed oss 36b": Published(
        ModelShape(64, 5120, 80, 8, 128, 27648, 155136, qkv_bias=True), 36e9,
        "github.com/ByteDance-Seed/seed-oss README.md; Transformers' SeedOssConfig (width, vocabulary)",
    ),
    "command r v01": Published(
        _tied(40, 8192, 64, 64, 128, 22528, 256000), 35e9, "Transformers' CohereConfig and its page (35 billion)"
    ),
    "command r 08": Published(
        _tied(40, 8192, 64, 8, 128, 24576, 256000), 32.3e9,
        "config.json of unsloth/c4ai-command-r-08-2024; huggingface.co/cortexhub/command-r (32.3B)",
    ),
    "command r plus": Published(
        _tied(64, 12288, 96, 8, 128, 33792, 256000), 104e9,
        "config.json of FriendliAI/c4ai-command-r-plus-fp8; huggingface.co/CohereForAI/c4ai-command-r-plus (104B)",
    ),
    "phi4 14b": Published(
        _llama(40, 5120, 40, 10, 17920, 100352), 14.7e9,
        "github.com/pytorch/torchtune models/phi4/_model_builders.py; github.com/LG-AI-EXAONE/EXAONE-4.0 README.md",
    ),
    "mistral small 24b": Published(
        ModelShape(40, 5120, 32, 8, 128, 32768, 131072), 23.6e9,
        "config.json of unsloth/Mistral-Small-24B-Instruct-2501-GGUF; github.com/LG-AI-EXAONE/EXAONE-4.0 README.md",
    ),
    "exaone 32b": Published(
        _llama(64, 5120, 40, 8, 27392, 102400), 32.0e9,
        "config.json of LGAI-EXAONE/EXAONE-3.5-32B-Instruct-AWQ; github.com/LG-AI-EXAONE/EXAONE-4.0 README.md",
    ),
    "granite3 8b": Published(
        _tied(40, 4096, 32, 8, 128, 12800, 49155), 8.17e9,
        "config.json of tbmod/granite-3.2-8b-instruct; huggingface.co/lm-kit/granite-3.1-8b-instruct-gguf (8.17B)",
    ),
    "olmo2 7b": Published(
        ModelShape(32, 4096, 32, 32, 128, 11008, 100352, qk_norm=True), 7.3e9,
        "config.json of allenai/OLMo-2-1124-7B; huggingface.co/allenai/OLMo-2-1124-7B-GGUF (7.3B)",
    ),
    "olmo2 32b": Published(
        ModelShape(64, 5120, 40, 8, 128, 27648, 100352, qk_norm=True), 32.2e9,
        "config.json of allenai/OLMo-2-0325-32B; huggingface.co/allenai/OLMo-2-0325-32B-Instruct-GGUF (32.2B)",
    ),
    "olmo3 32b": Published(
        ModelShape(64, 5120, 40, 8, 128, 27648, 100278, qk_norm=True), 32.2e9,
        "ollama.com olmo-3.1:32b-instruct-q4_K_M (metadata); github.com/jakemanger/whatmodel olmo-3-1-32b-think.md",
    ),
    "deepseekv3": Published(
        _mixture(_DEEPSEEK_V3, 257, 9, 2048), 671e9,
        "Transformers' DeepseekV3Config; github.com/LG-AI-EXAONE/EXAONE-4.0 README.md (671B)",
    ),
    "minimax m2": Published(
        _mixture(ModelShape(62, 3072, 48, 8, 128, 1536, 200064, qk_norm=True), 256, 8, 1536), 229e9,
        "config.json of amd/MiniMax-M2.7-BF16; huggingface.co/collections/MiniMaxAI/minimax-m2",
    ),
}  # fmt: skip
"""Sizes of published models with their sources, by the words that a model's name must contain."""

KNOWN = {
    **{name: published.shape for name, published in PUBLISHED.items()},
    "llama 7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama 13b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama 65b": _llama(80, 8192, 64, 64, 22016, 32000),
    "llama2 7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama2 13b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama2 70b": _llama(80, 8192, 64, 8, 28672, 32000),
    "llama3 8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama3 70b": _llama(80, 8192, 64, 8, 28672, 128256),
    "llama3 405b": _llama(126, 16384, 128, 8, 53248, 128256),
    "mistral 7b": _llama(32, 4096, 32, 8, 14336, 32000),
    "mixtral 8x7b": _mixture(_llama(32, 4096, 32, 8, 14336, 32000), 8, 2, 14336),
    "mixtral 8x22b": _mixture(_llama(56, 6144, 48, 8, 16384, 32768), 8, 2, 16384),
    "qwen 14b": replace(_llama(40, 5120, 40, 40, 13696, 152064), family="qwen2", qkv_bias=True),
    "qwen2.5 7b": _qwen2(28, 3584, 28, 4, 18944, 152064),
    "qwen2.5 14b": _qwen2(48, 5120, 40, 8, 13824, 152064),
    "qwen2.5 32b": _qwen2(64, 5120, 40, 8, 27648, 152064),
    "qwen2.5 72b": _qwen2(80, 8192, 64, 8, 29568, 152064),
    "qwen3 0.6b": replace(_qwen3(28, 1024, 16, 8, 3072), tied_embeddings=True),
    "qwen3 1.7b": replace(_qwen3(28, 2048, 16, 8, 6144), tied_embeddings=True),
    "qwen3 4b": replace(_qwen3(36, 2560, 32, 8, 9728), tied_embeddings=True),
    "qwen3 8b": _qwen3(36, 4096, 32, 8, 12288),
    "qwen3 14b": _qwen3(40, 5120, 40, 8, 17408),
    "qwen3 32b": _qwen3(64, 5120, 64, 8, 25600),
    "qwen3 30b": _mixture(_qwen3(48, 2048, 32, 4, 6144), 128, 8, 768),
    "qwen3 235b": _mixture(_qwen3(94, 4096, 64, 4, 12288), 128, 8, 1536),
    "deepseekv2": _mixture(_DEEPSEEK_V2, 162, 8, 1536),
    "gpt3 175b": gpt(96, 12288, 96, 51200),
    "nemotron4 15b": replace(_llama(32, 6144, 48, 8, 24576, 256000), gated_ffn=False),
    "nemotron4 340b": replace(_llama(96, 18432, 96, 8, 73728, 256000), gated_ffn=False),
}
"""Sizes of published models, by the words that a model's name must contain."""


def known_model(name: str) -> ModelShape | None:
    """Return the sizes of the published model that `name` mentions (`LLAMA3.1_405B`), by its longest match, or None."""
    found = longest_match(name, KNOWN)
    return KNOWN[found] if found else None


def longest_match(name: str, known: Iterable[str]) -> str | None:
    """Return the longest of the known names whose words are all in `name`, or None."""
    words = _words(name)
    return max((one for one in known if set(one.split()) <= words), key=len, default=None)


def _words(name: str) -> set[str]:
    text = re.sub(r"[_\-/()@:]+", " ", name.lower())
    # "llama 3.1" -> "llama3.1", "deepseek v3" -> "deepseek3", which gets its v back below
    families = "llama|qwen|gpt|gemma|granite|olmo|mistral|mixtral|nemotron|deepseek"
    text = re.sub(rf"\b({families}) ?v?(\d+(?:\.\d+)?)(?= |$)", r"\1\2", text)
    words = set(text.split())
    words |= {re.sub(r"^(llama3|granite3|olmo3)\.\d$", r"\1", word) for word in words}
    words |= {re.sub(r"^deepseek(?=\d)", "deepseekv", word) for word in words}
    return words
