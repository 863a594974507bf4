"""Sizes of published models by name, for tables that name a model without its sizes; needs no torch.

From papers and configs. DeepSeek's shared experts are written as so many more that every token is routed to (without
multi-token prediction); the state-space layers of hybrid Nemotron models as attention over a window.
"""

from __future__ import annotations

import re
from dataclasses import replace

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
        gated_ffn=False, qkv_bias=True, output_bias=True, ffn_bias=True, norm_bias=True,
    )  # fmt: skip


_LATENT = LatentAttention(query_rank=1536, kv_rank=512, rotary_dim=64)
_DEEPSEEK_V2 = ModelShape(60, 5120, 128, 128, 128, 12288, 102400, dense_layers=frozenset({0}), latent=_LATENT)
_DEEPSEEK_V3 = ModelShape(61, 7168, 128, 128, 128, 18432, 129280, dense_layers=frozenset({0, 1, 2}), latent=_LATENT)

KNOWN = {
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
    "gpt oss 20b": _mixture(ModelShape(24, 2880, 64, 8, 64, 2880, 201088), 32, 4, 2880),
    "gpt oss 120b": _mixture(ModelShape(36, 2880, 64, 8, 64, 2880, 201088), 128, 4, 2880),
    "deepseekv2": _mixture(_DEEPSEEK_V2, 162, 8, 1536),
    "deepseekv3": _mixture(_DEEPSEEK_V3, 257, 9, 2048),
    "gpt3 175b": gpt(96, 12288, 96, 51200),
    "nemotron4 15b": replace(_llama(32, 6144, 48, 8, 24576, 256000), gated_ffn=False),
    "nemotron4 340b": replace(_llama(96, 18432, 96, 8, 73728, 256000), gated_ffn=False),
}
"""Sizes of published models, by the words that a model's name must contain."""


def known_model(name: str) -> ModelShape | None:
    """Return the sizes of the published model that `name` mentions (`LLAMA3.1_405B`), by its longest match, or None."""
    words = _words(name)
    matches = [known for known in KNOWN if set(known.split()) <= words]
    return KNOWN[max(matches, key=len)] if matches else None


def _words(name: str) -> set[str]:
    text = re.sub(r"[_\-/()@:]+", " ", name.lower())
    # "llama 3.1" -> "llama3.1", "deepseek v3" -> "deepseek3", which gets its v back below
    text = re.sub(r"\b(llama|qwen|gpt|mistral|mixtral|nemotron|deepseek) ?v?(\d+(?:\.\d+)?)(?= |$)", r"\1\2", text)
    words = set(text.split())
    words |= {re.sub(r"^(llama3)\.\d$", r"\1", word) for word in words}
    words |= {re.sub(r"^deepseek(?=\d)", "deepseekv", word) for word in words}
    return words
