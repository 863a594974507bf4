"""Sizes of a decoder-only language model that decide its parameters, FLOPs and memory; needs no torch.

Parameter counts by part equal those of the Transformers model. `facts` reads them from a config.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from pydantic import TypeAdapter

from stages.models.flops import AttentionWork, ModelFlops
from stages.models.layer_kinds import LayerKind
from stages.models.tower import Tower


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1).

    All heads' queries are made from one short vector, their keys and values from another; both have a rotary part (one
    for all keys).
    """

    query_rank: int
    kv_rank: int
    rotary_dim: int
    """Width of a head's rotary part in latent attention, in addition to `head_dim`."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes and options of a decoder-only Transformer."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Width of the dense feed-forward layers; in a mixture of experts without dense layers, of an expert."""
    vocab_size: int
    family: str = "llama"
    """Model family: `model_type` of the config."""
    tied_embeddings: bool = False
    gated_ffn: bool = True
    """True if feed-forward layers have three matrices (SwiGLU) rather than two."""
    qkv_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    norm_bias: bool = False
    """True if norms have a bias (LayerNorm); False if they have none (RMSNorm)."""
    embedding_norm: bool = False
    num_position_embeddings: int = 0
    """Number of rows of a learned table of positions; 0 with rotary positions or ALiBi."""
    num_experts: int = 0
    """Number of routed experts in a mixture-of-experts layer; 0 in a dense model."""
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    router_normalizes: bool = True
    """True if the router's weights of a token's chosen experts add up to one."""
    dense_layers: frozenset[int] = frozenset()
    sliding_window: int | None = None
    """Size of the sliding attention window in tokens, in every layer; None: no window."""
    latent: LatentAttention | None = None
    max_positions: int | None = None
    norm_epsilon: float = 1e-5
    has_split_plan: bool = True
    """True if Transformers has a plan of tensor parallelism for the family, which splits all that is by heads."""
    split_flaw: str = ""
    """Reason, as a clause, why a model split by that plan computes something else, as a walk sees it; empty: none."""
    packs: bool = True
    """True if documents are trained packed in rows; False if each must be a row of its own."""
    kinds: tuple[LayerKind, ...] = ()
    """Kinds of layers as a walk has measured them, which say more than the fields above; (): those say it all."""
    former_names: tuple[tuple[str, str], ...] = ()
    """Former names of linear layers of experts, which adapters may name, and the endings of today's parameters."""
    other_parameters: int = 0
    """Number of parameters outside layers, embedding and head, such as a vision tower's; of a walked model only."""
    other_products: float = 0.0
    """Number of weights outside layers and head that a token is multiplied by (Gemma 3n); of a walked model only."""
    towers: tuple[Tower, ...] = ()
    """Costs of pictures and of sounds in a walked model; (): it reads text alone."""

    @classmethod
    def from_json(cls, text: str) -> ModelShape:
        return TypeAdapter(cls).validate_json(text)

    def to_json(self) -> str:
        return TypeAdapter(ModelShape).dump_json(self, exclude_defaults=True).decode()

    @cached_property
    def _kind_by_layer(self) -> dict[int, LayerKind]:
        return {layer: kind for kind in self.kinds for layer in kind.layers}

    def kind_of(self, layer: int) -> LayerKind | None:
        """Return the kind of a walked model's layer; None for a model of formulas."""
        return self._kind_by_layer.get(layer)

    def with_another_layer(self) -> ModelShape:
        """Return the shape of the model with one more layer, like its last one."""
        number = self.num_layers
        kinds = tuple(
            replace(kind, layers=(*kind.layers, number)) if number - 1 in kind.layers else kind for kind in self.kinds
        )
        dense = self.dense_layers | ({number} if number - 1 in self.dense_layers else set())
        return replace(self, num_layers=number + 1, kinds=kinds, dense_layers=dense)

    def is_mixture(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def num_mixture_layers(self) -> int:
        return self.num_layers - len(self.dense_layers) if self.num_experts else 0

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys of all key-value heads together; values have the same width."""
        return self.num_kv_heads * self.head_dim

    def kv_cache_bytes(self, num_tokens: int, bytes_per_value: int, ranks: int) -> float:
        """Return the bytes of the keys and values of a server's request on one of the `ranks` that share each layer."""
        if self.kinds:
            widths = (
                len(kind.layers) * max(1, one.num_kv_heads // ranks) * (one.key_width + one.value_width)
                for kind in self.kinds
                for one in kind.attention
            )
            return sum(widths) * bytes_per_value * num_tokens
        heads = max(1, self.num_kv_heads // ranks)
        return 2 * self.num_layers * heads * self.head_dim * bytes_per_value * num_tokens

    @property
    def rotary_width(self) -> int:
        """Width of the rotary parts of queries or keys of all heads in latent attention; 0 in other attention."""
        return self.num_heads * self.latent.rotary_dim if self.latent else 0

    @property
    def latent_width(self) -> int:
        """Width of the compressed query, key-value and rotary vectors in multi-head latent attention (MLA), else 0."""
        return self.latent.query_rank + self.latent.kv_rank + self.latent.rotary_dim if self.latent else 0

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def position_parameters(self) -> int:
        return self.num_position_embeddings * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Number of parameters of the output head; 0 if it is tied to the embedding."""
        return 0 if self.tied_embeddings else self.embedding_parameters

    @property
    def attention_matrix_parameters(self) -> int:
        """Number of weights in one layer's four attention projections (latent attention: five)."""
        if self.latent is None:
            return self.hidden_size * (2 * self.query_width + 2 * self.kv_width)
        # From the hidden state to the compressed vectors, and from all heads back to it.
        whole = self.hidden_size * (self.latent_width + self.query_width)
        # From compressed vectors to the heads: queries with their rotary part, then keys and values.
        queries = self.latent.query_rank * (self.query_width + self.rotary_width)
        return whole + queries + self.latent.kv_rank * (self.kv_width + self.query_width)

    @property
    def attention_parameters(self) -> int:
        """Number of parameters of one layer's attention, without the norm before it."""
        bias = self.qkv_bias * (self.query_width + 2 * self.kv_width) + self.output_bias * self.hidden_size
        # Two norms, of queries and of keys, each shared by all heads.
        return self.attention_matrix_parameters + bias + self.qk_norm * 2 * self.head_dim

    @property
    def ffn_parameters(self) -> int:
        return self._ffn(self.ffn_size)

    @property
    def expert_parameters(self) -> int:
        return self._ffn(self.expert_ffn_size) if self.num_experts else 0

    @cached_property
    def routed_parameters(self) -> int:
        """Number of parameters of all routed experts of a walked model."""
        return sum(len(kind.layers) * kind.num_expert_parameters for kind in self.kinds)

    def mean(self, measure: Callable[[LayerKind], float]) -> float:
        """Return the mean of a measure over a walked model's layers."""
        return sum(len(kind.layers) * measure(kind) for kind in self.kinds) / self.num_layers

    @property
    def router_parameters(self) -> int:
        return self.num_experts * self.hidden_size

    @property
    def norm_parameters(self) -> int:
        return self.hidden_size * (1 + self.norm_bias)

    def layer_parameters(self, layer: int) -> int:
        mixture = self.router_parameters + self.num_experts * self.expert_parameters
        ffn = mixture if self.is_mixture(layer) else self.ffn_parameters
        return self.attention_parameters + ffn + 2 * self.norm_parameters

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model, each counted once."""
        if self.kinds:
            of_kinds = (len(one.layers) * (one.num_parameters + one.num_expert_parameters) for one in self.kinds)
            return sum(of_kinds) + self.embedding_parameters + self.head_parameters + self.other_parameters
        layers = sum(self.layer_parameters(layer) for layer in range(self.num_layers))
        norms = self.norm_parameters * (1 + self.embedding_norm)
        return layers + norms + self.embedding_parameters + self.position_parameters + self.head_parameters

    def flops(self) -> ModelFlops:
        """Return the sizes that decide the model's FLOPs, equal to those counted on a built model."""
        if self.kinds:
            return self._walked_flops()
        matrices = 3 if self.gated_ffn else 2
        dense = (self.num_layers - self.num_mixture_layers) * matrices * self.ffn_size
        # Of the experts, those that a token is routed to; the router's matrix whole.
        routed = self.num_mixture_layers * (matrices * self.experts_per_token * self.expert_ffn_size + self.num_experts)
        per_token = self.num_layers * self.attention_matrix_parameters + self.hidden_size * (dense + routed)
        # Queries and keys are head_dim + rotary_dim wide, values head_dim.
        work = AttentionWork((2 * self.query_width + self.rotary_width) * self.num_layers, self.sliding_window)
        return ModelFlops(per_token, self.embedding_parameters, (work,))

    def _walked_flops(self) -> ModelFlops:
        products = self.other_products + sum(len(kind.layers) * kind.products for kind in self.kinds)
        states = sum(len(kind.layers) * kind.state_products for kind in self.kinds)
        widths: dict[int | None, int] = {}
        for kind in self.kinds:
            for one in kind.attention:
                work = one.work
                widths[work.window_tokens] = widths.get(work.window_tokens, 0) + len(kind.layers) * work.width
        attention = tuple(AttentionWork(width, window) for window, width in widths.items())
        return ModelFlops(products, self.embedding_parameters, attention, state_products=states)

    def _ffn(self, width: int) -> int:
        matrices = 3 if self.gated_ffn else 2
        # Inward matrices have a bias of the layer's width, the outward one of the hidden size.
        bias = self.ffn_bias * (width * (matrices - 1) + self.hidden_size)
        return matrices * self.hidden_size * width + bias
