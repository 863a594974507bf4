"""The linear layers of a model, and all modules that have parameters, by their names in Transformers. Pure.

From the shape alone, before there is a model: `projections` reads them from the files of one that is there. In a
mixture of experts only attention has linear layers: experts are stacked parameters, and routers are parameters, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from stages.models.shape import ModelShape


class Place(Enum):
    """Where a linear layer is: those of one place have the same input, and are one matrix in Megatron."""

    INTO_ATTENTION = "into attention"
    OUT_OF_ATTENTION = "out of attention"
    INTO_FFN = "into the feed-forward part"
    OUT_OF_FFN = "out of the feed-forward part"

    @property
    def cuts_inputs(self) -> bool:
        """Whether tensor parallelism cuts the inputs rather than the outputs."""
        return self in (Place.OUT_OF_ATTENTION, Place.OUT_OF_FFN)


@dataclass(frozen=True)
class Linear:
    """A linear layer of the Transformers model."""

    name: str
    place: Place
    inputs: int
    outputs: int


@dataclass(frozen=True)
class StackedParameter:
    """A parameter of a mixture of experts: one matrix [outputs, inputs] of each expert, or the router's one."""

    name: str
    place: Place
    inputs: int
    outputs: int
    num_experts: int
    is_router: bool = False


@dataclass(frozen=True)
class _Names:
    """What a family of models calls its modules; those of a layer follow its number."""

    layer: str
    places: dict[Place, tuple[str, ...]]
    norms: tuple[str, ...]
    embedding: str
    final_norm: str


_LLAMA = _Names(
    "model.layers",
    {
        Place.INTO_ATTENTION: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        Place.OUT_OF_ATTENTION: ("self_attn.o_proj",),
        Place.INTO_FFN: ("mlp.gate_proj", "mlp.up_proj"),
        Place.OUT_OF_FFN: ("mlp.down_proj",),
    },
    ("input_layernorm", "post_attention_layernorm"),
    "model.embed_tokens",
    "model.norm",
)
_FAMILIES = {
    "gpt2": _Names(
        "transformer.h",
        {
            Place.INTO_ATTENTION: ("attn.c_attn",),
            Place.OUT_OF_ATTENTION: ("attn.c_proj",),
            Place.INTO_FFN: ("mlp.c_fc",),
            Place.OUT_OF_FFN: ("mlp.c_proj",),
        },
        ("ln_1", "ln_2"),
        "transformer.wte",
        "transformer.ln_f",
    ),
    "opt": _Names(
        "model.decoder.layers",
        {
            Place.INTO_ATTENTION: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            Place.OUT_OF_ATTENTION: ("self_attn.out_proj",),
            Place.INTO_FFN: ("fc1",),
            Place.OUT_OF_FFN: ("fc2",),
        },
        ("self_attn_layer_norm", "final_layer_norm"),
        "model.decoder.embed_tokens",
        "model.decoder.final_layer_norm",
    ),
    "bloom": _Names(
        "transformer.h",
        {
            Place.INTO_ATTENTION: ("self_attention.query_key_value",),
            Place.OUT_OF_ATTENTION: ("self_attention.dense",),
            Place.INTO_FFN: ("mlp.dense_h_to_4h",),
            Place.OUT_OF_FFN: ("mlp.dense_4h_to_h",),
        },
        ("input_layernorm", "post_attention_layernorm"),
        "transformer.word_embeddings",
        "transformer.ln_f",
    ),
    "mpt": _Names(
        "transformer.blocks",
        {
            Place.INTO_ATTENTION: ("attn.Wqkv",),
            Place.OUT_OF_ATTENTION: ("attn.out_proj",),
            Place.INTO_FFN: ("ffn.up_proj",),
            Place.OUT_OF_FFN: ("ffn.down_proj",),
        },
        ("norm_1", "norm_2"),
        "transformer.wte",
        "transformer.norm_f",
    ),
}
"""Those whose names are not Llama's."""


def linear_layers(shape: ModelShape, layer: int) -> tuple[Linear, ...]:
    """Those of a layer, by the names of the Transformers model."""
    names = _FAMILIES.get(shape.family, _LLAMA)
    hidden, queries, kv, ffn = shape.hidden_size, shape.query_width, shape.kv_width, shape.ffn_size
    attention = {Place.INTO_ATTENTION: (hidden, (queries, kv, kv)), Place.OUT_OF_ATTENTION: (queries, (hidden,))}
    feed_forward = {Place.INTO_FFN: (hidden, (ffn, ffn)), Place.OUT_OF_FFN: (ffn, (hidden,))}
    sizes = attention if shape.is_mixture(layer) else {**attention, **feed_forward}
    found = []
    for place, (inputs, outputs) in sizes.items():
        called = names.places[place]
        if len(called) == 1 and place is Place.INTO_ATTENTION:
            outputs = (sum(outputs),)
        for name, width in zip(called, outputs, strict=False):  # without a gate only one matrix leads in
            found.append(Linear(f"{names.layer}.{layer}.{name}", place, inputs, width))
    return tuple(found)


def stacked_parameters(shape: ModelShape, layer: int) -> tuple[StackedParameter, ...]:
    """Of a layer's experts and router, by the names of the Transformers model; none in a dense layer."""
    if not shape.is_mixture(layer):
        return ()
    hidden, width, number = shape.hidden_size, shape.expert_ffn_size, shape.num_experts
    mlp = f"{_FAMILIES.get(shape.family, _LLAMA).layer}.{layer}.mlp"
    inward = (2 if shape.gated_ffn else 1) * width
    return (
        StackedParameter(f"{mlp}.experts.gate_up_proj", Place.INTO_FFN, hidden, inward, number),
        StackedParameter(f"{mlp}.experts.down_proj", Place.OUT_OF_FFN, width, hidden, number),
        StackedParameter(f"{mlp}.gate.weight", Place.INTO_FFN, hidden, number, 1, is_router=True),
    )


def module_parameters(shape: ModelShape) -> dict[str, int]:
    """Name of a module → parameters of its own."""
    names = _FAMILIES.get(shape.family, _LLAMA)
    found = {names.embedding: shape.embedding_parameters, names.final_norm: shape.norm_parameters}
    found["lm_head"] = shape.head_parameters
    for layer in range(shape.num_layers):
        for norm in names.norms:
            found[f"{names.layer}.{layer}.{norm}"] = shape.norm_parameters
        for one in linear_layers(shape, layer):
            bias = {
                Place.INTO_ATTENTION: shape.qkv_bias,
                Place.OUT_OF_ATTENTION: shape.output_bias,
            }.get(one.place, shape.ffn_bias)
            found[one.name] = one.outputs * (one.inputs + bias)
        if shape.qk_norm:
            found |= {f"{names.layer}.{layer}.self_attn.{norm}": shape.head_dim for norm in ("q_norm", "k_norm")}
        if shape.is_mixture(layer):
            found[f"{names.layer}.{layer}.mlp.gate"] = shape.router_parameters
            found[f"{names.layer}.{layer}.mlp.experts"] = shape.num_experts * shape.expert_parameters
    return found
