"""Linear layers of a model by their names in Transformers, from its shape or from the headers of its safetensors files.

From the shape (`linear_layers`, `module_parameters`), before there is a model; in a mixture of experts, stacked experts
and routers are parameters. From files (`read_projections`; no torch, milliseconds) every matrix named `….weight` that
is no embedding; the usual architectures' names are also what serving engines split and fuse by.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from safetensors import safe_open

from stages.models.layer_kinds import LayerRole, Linear, PlannedSplit, StackedParameter
from stages.models.shape import ModelShape


@dataclass(frozen=True)
class _Names:
    """Names of modules in a model family. Names inside a transformer layer follow the layer's number."""

    layer: str
    places: dict[LayerRole, tuple[str, ...]]
    norms: tuple[str, ...]
    embedding: str
    final_norm: str
    are_conv1d: bool = False
    """True if the layers are of Transformers' class Conv1D, which is no linear layer of torch."""


_LLAMA = _Names(
    "model.layers",
    {
        LayerRole.INTO_ATTENTION: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        LayerRole.OUT_OF_ATTENTION: ("self_attn.o_proj",),
        LayerRole.INTO_FFN: ("mlp.gate_proj", "mlp.up_proj"),
        LayerRole.OUT_OF_FFN: ("mlp.down_proj",),
    },
    ("input_layernorm", "post_attention_layernorm"),
    "model.embed_tokens",
    "model.norm",
)
_FAMILIES = {
    "gpt2": _Names(
        "transformer.h",
        {
            LayerRole.INTO_ATTENTION: ("attn.c_attn",),
            LayerRole.OUT_OF_ATTENTION: ("attn.c_proj",),
            LayerRole.INTO_FFN: ("mlp.c_fc",),
            LayerRole.OUT_OF_FFN: ("mlp.c_proj",),
        },
        ("ln_1", "ln_2"),
        "transformer.wte",
        "transformer.ln_f",
        are_conv1d=True,
    ),
    "opt": _Names(
        "model.decoder.layers",
        {
            LayerRole.INTO_ATTENTION: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            LayerRole.OUT_OF_ATTENTION: ("self_attn.out_proj",),
            LayerRole.INTO_FFN: ("fc1",),
            LayerRole.OUT_OF_FFN: ("fc2",),
        },
        ("self_attn_layer_norm", "final_layer_norm"),
        "model.decoder.embed_tokens",
        "model.decoder.final_layer_norm",
    ),
    "bloom": _Names(
        "transformer.h",
        {
            LayerRole.INTO_ATTENTION: ("self_attention.query_key_value",),
            LayerRole.OUT_OF_ATTENTION: ("self_attention.dense",),
            LayerRole.INTO_FFN: ("mlp.dense_h_to_4h",),
            LayerRole.OUT_OF_FFN: ("mlp.dense_4h_to_h",),
        },
        ("input_layernorm", "post_attention_layernorm"),
        "transformer.word_embeddings",
        "transformer.ln_f",
    ),
    "mpt": _Names(
        "transformer.blocks",
        {
            LayerRole.INTO_ATTENTION: ("attn.Wqkv",),
            LayerRole.OUT_OF_ATTENTION: ("attn.out_proj",),
            LayerRole.INTO_FFN: ("ffn.up_proj",),
            LayerRole.OUT_OF_FFN: ("ffn.down_proj",),
        },
        ("norm_1", "norm_2"),
        "transformer.wte",
        "transformer.norm_f",
    ),
}
"""Module names of the model families whose names differ from Llama's."""


def linear_layers(shape: ModelShape, layer: int) -> tuple[Linear, ...]:
    """Return the linear layers of one transformer layer, with their names in Transformers."""
    if kind := shape.kind_of(layer):
        return tuple(replace(one, name=f"{kind.name_of(layer)}.{one.name}") for one in kind.linears)
    names = _FAMILIES.get(shape.family, _LLAMA)
    hidden, queries, kv, ffn = shape.hidden_size, shape.query_width, shape.kv_width, shape.ffn_size
    attention = {
        LayerRole.INTO_ATTENTION: (hidden, (queries, kv, kv)),
        LayerRole.OUT_OF_ATTENTION: (queries, (hidden,)),
    }
    feed_forward = {LayerRole.INTO_FFN: (hidden, (ffn, ffn)), LayerRole.OUT_OF_FFN: (ffn, (hidden,))}
    sizes = attention if shape.is_mixture(layer) else {**attention, **feed_forward}
    layers = []
    for place, (inputs, outputs) in sizes.items():
        called = names.places[place]
        if len(called) == 1 and place is LayerRole.INTO_ATTENTION:
            # Families with one matrix for queries, keys and values.
            outputs = (sum(outputs),)
        for name, width in zip(called, outputs, strict=False):  # without a gate only one matrix leads in
            split = _planned_split(shape, place)
            layers.append(Linear(f"{names.layer}.{layer}.{name}", place, inputs, width, split=split))
    return tuple(layers)


def stacked_parameters(shape: ModelShape, layer: int) -> tuple[StackedParameter, ...]:
    """Return the parameters of a layer's experts and router, by their names in Transformers. A dense layer has none."""
    if kind := shape.kind_of(layer):
        return tuple(replace(one, name=f"{kind.name_of(layer)}.{one.name}") for one in kind.stacked)
    if not shape.is_mixture(layer):
        return ()
    hidden, width, number = shape.hidden_size, shape.expert_ffn_size, shape.num_experts
    mlp = f"{_FAMILIES.get(shape.family, _LLAMA).layer}.{layer}.mlp"
    inward = (2 if shape.gated_ffn else 1) * width  # gate and up side by side
    into, out = LayerRole.INTO_FFN, LayerRole.OUT_OF_FFN
    return (
        StackedParameter(
            f"{mlp}.experts.gate_up_proj", into, hidden, inward, number, split=_planned_split(shape, into)
        ),
        StackedParameter(f"{mlp}.experts.down_proj", out, width, hidden, number, split=_planned_split(shape, out)),
        StackedParameter(f"{mlp}.gate.weight", LayerRole.INTO_FFN, hidden, number, 1, is_router=True),
    )


NF4_BLOCK = 64
"""Number of consecutive weights of a matrix row that share a one-byte scale in NF4; see `stages.adapters.quantized`."""
NUM_NAMED = 5


def quantizing_error(shape: ModelShape, precision: str, saved: Callable[[str], bool]) -> str | None:
    """Return why a frozen model of this shape cannot be stored in `precision`, `nf4` or `int8`; None if it can.

    saved: returns whether a layer of this name learns, and is kept as it is.
    """
    layers = range(0 if _FAMILIES.get(shape.family, _LLAMA).are_conv1d else shape.num_layers)
    inputs = {one.name: one.inputs for layer in layers for one in linear_layers(shape, layer) if not saved(one.name)}
    stacked = [one.name for layer in layers for one in stacked_parameters(shape, layer) if not one.is_router]
    return unquantizable(precision, inputs, stacked, shape.family)


def unquantizable(precision: str, inputs: Mapping[str, int], stacked: list[str], model: str) -> str | None:
    """Return why frozen layers cannot be stored as `nf4` or `int8`, with the nearest precision that works; else None.

    inputs: number of inputs of each frozen linear layer by name. stacked: names of parameters of more than two
    dimensions, such as those of all experts of a layer. model: in words.
    """
    odd = [name for name, number in inputs.items() if precision == "nf4" and number % NF4_BLOCK]
    if inputs and not stacked and not odd:
        return None
    reason, nearest = f"inputs of {_named(odd)} are no multiple of {NF4_BLOCK}", "int8"
    if stacked or not inputs:
        reason = f"{_named(stacked)} are stacks of matrices" if stacked else f"{model} has none"
        nearest = "bf16"
    return (
        f"`adapter.base_precision: {precision}` stores linear layers in fewer bits, but {reason}; set "
        f"`adapter.base_precision: {nearest}`, the nearest that works"
    )


def _named(names: list[str]) -> str:
    return f"{', '.join(names[:NUM_NAMED])}" + (f" and {len(names) - NUM_NAMED} more" if names[NUM_NAMED:] else "")


def _planned_split(shape: ModelShape, place: LayerRole) -> PlannedSplit | None:
    """Return how Transformers' plan splits the matrices at a place of a model of formulas."""
    if not shape.has_split_plan:
        return None
    return "rows" if place.cuts_inputs else "columns"


def module_parameters(shape: ModelShape) -> dict[str, int]:
    """Return the number of parameters that each module owns, by module name; of a walked model without norms."""
    if shape.kinds:
        walked = {"embed_tokens": shape.embedding_parameters, "lm_head": shape.head_parameters}
        for layer in range(shape.num_layers):
            walked |= {one.name: one.inputs * one.outputs for one in linear_layers(shape, layer)}
            walked |= {one.name: one.num_experts * one.inputs * one.outputs for one in stacked_parameters(shape, layer)}
        return walked
    names = _FAMILIES.get(shape.family, _LLAMA)
    parameters = {names.embedding: shape.embedding_parameters, names.final_norm: shape.norm_parameters}
    parameters["lm_head"] = shape.head_parameters
    for layer in range(shape.num_layers):
        for norm in names.norms:
            parameters[f"{names.layer}.{layer}.{norm}"] = shape.norm_parameters
        for linear in linear_layers(shape, layer):
            bias = {
                LayerRole.INTO_ATTENTION: shape.qkv_bias,
                LayerRole.OUT_OF_ATTENTION: shape.output_bias,
            }.get(linear.place, shape.ffn_bias)
            parameters[linear.name] = linear.outputs * (linear.inputs + bias)  # a bias counts as one more input
        if shape.qk_norm:
            parameters |= {f"{names.layer}.{layer}.self_attn.{norm}": shape.head_dim for norm in ("q_norm", "k_norm")}
        if shape.is_mixture(layer):
            parameters[f"{names.layer}.{layer}.mlp.gate"] = shape.router_parameters
            parameters[f"{names.layer}.{layer}.mlp.experts"] = shape.num_experts * shape.expert_parameters
    return parameters


EMBEDDINGS = re.compile(
    r"(embed_tokens(_per_layer)?|wte|wpe|word_embeddings|embed_in|tok_embeddings|embed_positions|position_embeddings?)$"
)
BESIDE_TEXT = re.compile(r"(^|\.)(vision|visual|image|audio|speech|multi_modal|connector|embed_(vision|audio))[^.]*\.")
"""Pattern of the names of layers in towers for images or sound, or behind them, in families that have any."""
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""Groups of linear layers with the same input, which serving engines load as one matrix."""
COLUMN_PARALLEL = {name for names in FUSED for name in names} | {"qkv_proj", "gate_up_proj", "fc1", "c_fc"}
ROW_PARALLEL = {"o_proj", "down_proj", "out_proj", "w2", "fc2", "dense_4h_to_h", "c_proj"}

EXPERTS = r"re:.*\.experts\."
"""Pattern of module names that matches every linear layer of an expert."""


class Split(Enum):
    """Dimension of a weight that tensor parallelism divides between its ranks."""

    NOTHING = "nothing"
    OUTPUT = "output"
    INPUT = "input"


@dataclass(frozen=True)
class Projection:
    """Linear layer in a model's files, named as its module (without `.weight`), with its sizes."""

    name: str
    output_size: int
    input_size: int

    @property
    def suffix(self) -> str:
        """Last part of the layer's name, such as `down_proj`."""
        return self.name.rpartition(".")[2]

    @property
    def split(self) -> Split:
        """Dimension that tensor parallelism splits: output (column-parallel), input (row-parallel) or nothing."""
        if self.suffix in COLUMN_PARALLEL:
            return Split.OUTPUT
        return Split.INPUT if self.suffix in ROW_PARALLEL else Split.NOTHING

    @property
    def is_expert(self) -> bool:
        """Return whether the layer belongs to one expert of a mixture of experts; experts have kernels of their own."""
        return ".experts." in self.name

    @property
    def fused_name(self) -> str:
        """Name shared by all linear layers that serving engines fuse, such as `q_proj+k_proj+v_proj`."""
        partners = next((names for names in FUSED if self.suffix in names), (self.suffix,))
        return self.name.removesuffix(self.suffix) + "+".join(partners)


def read_projections(model_folder: Path) -> list[Projection]:
    """Return all linear layers in a model's files by name, `lm_head` and routers included."""
    projections = []
    for path in sorted(model_folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as weights:
            for key in weights.keys():  # noqa: SIM118 – not a mapping
                name = key.removesuffix(".weight")
                shape = weights.get_slice(key).get_shape()
                if name != key and len(shape) == 2 and not EMBEDDINGS.search(name):
                    projections.append(Projection(name, *shape))
    return sorted(projections, key=lambda projection: projection.name)


def projections_of(shape: ModelShape) -> list[Projection]:
    """Return the linear layers of one dense layer of Llama or its relatives from sizes; [] for other families."""
    if not shape.gated_ffn or shape.num_layers == shape.num_mixture_layers:
        return []
    hidden, queries, keys = shape.hidden_size, shape.query_width, shape.num_kv_heads * shape.head_dim
    sizes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (shape.ffn_size, hidden),
        "mlp.up_proj": (shape.ffn_size, hidden),
        "mlp.down_proj": (hidden, shape.ffn_size),
    }
    layer = next(number for number in range(shape.num_layers) if not shape.is_mixture(number))
    return [Projection(f"model.layers.{layer}.{name}", *size) for name, size in sizes.items()]


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a module has one of these names, or matches one of these patterns, which begin with `re:`."""
    return any(
        re.match(pattern.removeprefix("re:"), name) if pattern.startswith("re:") else pattern == name
        for pattern in patterns
    )
