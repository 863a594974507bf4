"""The shape of a decoder-only language model: what decides its parameters, FLOPs and memory. Pure; needs no torch.

In: a Hugging Face `config.json` as a dictionary (Transformers 4 and 5 spellings), or the numbers themselves.
Out: `ModelShape`, with parameter counts by part that equal those of the Transformers model.
Which layouts a shape allows is for `legality`, and what a step costs is for `planner`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stages.core.errors import ModelError
from stages.models.flops import AttentionWork, ModelFlops

ROTARY_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")
GPT_FAMILIES = ("gpt2", "opt", "bloom", "mpt")
OPT_POSITION_OFFSET = 2
"""OPT keeps two unused rows in its table of positions."""

SPELLINGS = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab_size": ("vocab_size",),
    "ffn_size": ("intermediate_size", "ffn_dim", "n_inner"),
    "num_experts": ("num_local_experts", "num_experts"),
    "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
}
"""Fields of the shape → names that configs give them."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only Transformer."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Width of the dense feed-forward layers (of a mixture without any: of an expert)."""
    vocab_size: int
    family: str = "llama"
    """`model_type` of the config."""
    tied_embeddings: bool = False
    gated_ffn: bool = True
    """Three matrices (SwiGLU) rather than two."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of attention's output projection."""
    ffn_bias: bool = False
    qk_norm: bool = False
    norm_bias: bool = False
    """LayerNorm rather than RMSNorm."""
    embedding_norm: bool = False
    num_position_embeddings: int = 0
    """Rows of a learned table of positions; 0 with rotary positions or ALiBi."""
    num_experts: int = 0
    """Routed experts of a mixture layer; 0 in a dense model."""
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    router_normalizes: bool = True
    """Whether the weights of a token's experts add up to one."""
    dense_layers: frozenset[int] = frozenset()
    """Layers of a mixture-of-experts model that are dense nevertheless."""
    sliding_window: int | None = None
    """Tokens that a position attends to, in every layer; None: all before it."""
    max_positions: int | None = None
    rope_theta: float | None = None
    norm_epsilon: float = 1e-5

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a `config.json` (of a multimodal model: its text part).

        Raises ModelError for a family that is not known, and for what is lacking or makes no sense, by name.
        """
        text = config.get("text_config")
        fields = {**config, **text} if isinstance(text, Mapping) else config
        family = fields.get("model_type")
        if family in ROTARY_FAMILIES:
            return _rotary(family, fields)
        if family in GPT_FAMILIES:
            return _gpt(family, fields)
        known = ", ".join((*ROTARY_FAMILIES, *GPT_FAMILIES))
        raise ModelError(f"reading the model's config: model_type is {family!r}; sizes are known for {known}")

    def is_mixture(self, layer: int) -> bool:
        """Whether this layer routes tokens to experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def num_mixture_layers(self) -> int:
        """Layers that route tokens to experts."""
        return self.num_layers - len(self.dense_layers) if self.num_experts else 0

    @property
    def query_width(self) -> int:
        """Width of all heads' queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all heads' keys; values have the same."""
        return self.num_kv_heads * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def position_parameters(self) -> int:
        """Parameters of learned positions."""
        return self.num_position_embeddings * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Parameters of the output layer that are not the embedding's."""
        return 0 if self.tied_embeddings else self.embedding_parameters

    @property
    def attention_matrix_parameters(self) -> int:
        """Weights of one layer's four projections."""
        return self.hidden_size * (2 * self.query_width + 2 * self.kv_width)

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention, without norms before it."""
        bias = self.qkv_bias * (self.query_width + 2 * self.kv_width) + self.output_bias * self.hidden_size
        return self.attention_matrix_parameters + bias + self.qk_norm * 2 * self.head_dim

    @property
    def ffn_parameters(self) -> int:
        """Parameters of a dense layer's feed-forward part."""
        return self._ffn(self.ffn_size)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        return self._ffn(self.expert_ffn_size) if self.num_experts else 0

    @property
    def router_parameters(self) -> int:
        """Parameters of a mixture layer's router."""
        return self.num_experts * self.hidden_size

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm over the hidden size."""
        return self.hidden_size * (1 + self.norm_bias)

    def layer_parameters(self, layer: int) -> int:
        """Parameters of a layer, all experts included."""
        mixture = self.router_parameters + self.num_experts * self.expert_parameters
        ffn = mixture if self.is_mixture(layer) else self.ffn_parameters
        return self.attention_parameters + ffn + 2 * self.norm_parameters

    @cached_property
    def num_parameters(self) -> int:
        """All parameters, each counted once."""
        layers = sum(self.layer_parameters(layer) for layer in range(self.num_layers))
        norms = self.norm_parameters * (1 + self.embedding_norm)
        return layers + norms + self.embedding_parameters + self.position_parameters + self.head_parameters

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token meets: of a mixture's experts only those it is routed to."""
        idle = self.num_experts - self.experts_per_token if self.num_experts else 0
        return self.num_parameters - self.num_mixture_layers * idle * self.expert_parameters

    def flops(self) -> ModelFlops:
        """What decides the FLOPs of this model, counted as for a model that is there."""
        matrices = 3 if self.gated_ffn else 2
        dense = (self.num_layers - self.num_mixture_layers) * matrices * self.ffn_size
        routed = self.num_mixture_layers * (matrices * self.experts_per_token * self.expert_ffn_size + self.num_experts)
        per_token = self.num_layers * self.attention_matrix_parameters + self.hidden_size * (dense + routed)
        work = AttentionWork(2 * self.query_width * self.num_layers, self.sliding_window)
        return ModelFlops(per_token, self.embedding_parameters, (work,))

    def _ffn(self, width: int) -> int:
        matrices = 3 if self.gated_ffn else 2
        bias = self.ffn_bias * (width * (matrices - 1) + self.hidden_size)
        return matrices * self.hidden_size * width + bias


def _rotary(family: str, fields: Mapping[str, Any]) -> ModelShape:
    """Llama and its relatives: rotary positions, RMSNorm, SwiGLU, grouped queries."""
    hidden_size, num_heads = _size(fields, "hidden_size"), _size(fields, "num_heads")
    attention_bias = bool(fields.get("attention_bias", False))
    windowed = fields.get("use_sliding_window", family in ("mistral", "mixtral"))
    return ModelShape(
        num_layers=_size(fields, "num_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads") or num_heads,
        head_dim=fields.get("head_dim") or _head_dim(hidden_size, num_heads),
        ffn_size=_size(fields, "ffn_size"),
        vocab_size=_size(fields, "vocab_size"),
        family=family,
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        ffn_bias=bool(fields.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        sliding_window=fields.get("sliding_window") if windowed else None,
        max_positions=_optional(fields, "max_positions"),
        rope_theta=_rope_theta(fields),
        norm_epsilon=fields.get("rms_norm_eps", 1e-6),
        **_mixture(family, fields),
    )


def _mixture(family: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    if family not in ("mixtral", "qwen3_moe"):
        return {}
    num_layers, num_experts = _size(fields, "num_layers"), _size(fields, "num_experts")
    width = _size(fields, "ffn_size") if family == "mixtral" else _required(fields, ("moe_intermediate_size",))
    step, dense = fields.get("decoder_sparse_step") or 1, set(fields.get("mlp_only_layers") or ())
    dense |= {layer for layer in range(num_layers) if (layer + 1) % step}
    return {
        "num_experts": num_experts,
        "experts_per_token": _required(fields, ("num_experts_per_tok",)),
        "expert_ffn_size": width,
        "router_normalizes": family == "mixtral" or bool(fields.get("norm_topk_prob", False)),
        "dense_layers": frozenset(dense),
    }


def _gpt(family: str, fields: Mapping[str, Any]) -> ModelShape:
    """GPT-2 and its relatives: LayerNorm, two feed-forward matrices, learned positions or ALiBi, tied embeddings."""
    hidden_size, num_heads = _size(fields, "hidden_size"), _size(fields, "num_heads")
    has_bias = family != "mpt" or not fields.get("no_bias", True)
    max_positions = _optional(fields, "max_positions")
    positions = {"gpt2": max_positions or 0, "opt": (max_positions or 0) + OPT_POSITION_OFFSET}
    return ModelShape(
        num_layers=_size(fields, "num_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=_head_dim(hidden_size, num_heads),
        ffn_size=_optional(fields, "ffn_size") or int(fields.get("expansion_ratio", 4) * hidden_size),
        vocab_size=_size(fields, "vocab_size"),
        family=family,
        tied_embeddings=bool(fields.get("tie_word_embeddings", True)),
        gated_ffn=False,
        qkv_bias=has_bias,
        output_bias=has_bias,
        ffn_bias=has_bias,
        norm_bias=has_bias,
        embedding_norm=family == "bloom",
        num_position_embeddings=positions.get(family, 0),
        max_positions=max_positions,
        norm_epsilon=fields.get("layer_norm_epsilon", 1e-5),
    )


def _size(fields: Mapping[str, Any], name: str) -> int:
    return _required(fields, SPELLINGS[name])


def _optional(fields: Mapping[str, Any], name: str) -> int | None:
    spelling = next((spelling for spelling in SPELLINGS[name] if fields.get(spelling) is not None), None)
    return None if spelling is None else _required(fields, (spelling,))


def _required(fields: Mapping[str, Any], spellings: tuple[str, ...]) -> int:
    """The first of these that the config has, as a positive whole number."""
    spelling = next((spelling for spelling in spellings if fields.get(spelling) is not None), None)
    if spelling is None:
        raise ModelError(f"reading the model's config: {' or '.join(spellings)} is missing")
    value = fields[spelling]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"reading the model's config: {spelling} is {value!r}; expected a positive whole number")
    return value


def _head_dim(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ModelError(
            f"reading the model's config: hidden size {hidden_size} is not divisible by {num_heads} attention heads, "
            "and no head_dim is given"
        )
    return hidden_size // num_heads


def _rope_theta(fields: Mapping[str, Any]) -> float:
    """Transformers 5 keeps it in `rope_parameters`."""
    parameters = fields.get("rope_parameters")
    inner = parameters.get("rope_theta") if isinstance(parameters, Mapping) else None
    return float(inner or fields.get("rope_theta") or 10_000.0)
