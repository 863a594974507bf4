"""Mapping between Hugging Face weights and Megatron parameters, and how tensor parallelism cuts them.

A family is its name in `stages.parallel.engines.megatron`, and one line in `MAPPINGS`: its `model_type` and its rules.
A rule names a parameter as Megatron does, below its layer (or below the model), under both the local and the
Transformer Engine spec, and the weights that it is made of. Factors of an adapter follow from their layer's rule.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from stages.parallel.engines.megatron import check_family

LAYER_PREFIX = "model.layers.{layer}."
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class TensorParallelCut(Enum):
    """Way in which tensor parallelism cuts a weight, which decides the rows or columns that each rank holds."""

    WHOLE = auto()
    """Unsplit weight: every tensor-parallel rank holds all of it."""
    VOCABULARY = auto()
    """Split by rows of the vocabulary (embedding, head); the last may be padding, which no Hugging Face weight has."""
    COLUMNS = auto()
    """Tensor-parallel split of a weight by columns (input features)."""
    GATED = auto()
    """Split of a fused gate and up projection: a rank holds rows of the gate, and below them those of up."""
    HALVES = auto()
    """Split of two stacked matrices: a rank holds rows of the upper, and below them the same rows of the lower."""
    STACKED = auto()
    """Several unsplit weights stacked by rows in one parameter; every tensor-parallel rank holds all of them."""
    QKV = auto()
    """Split of a fused QKV matrix by groups, each of query rows, then key rows and value rows."""


@dataclass(frozen=True)
class WeightMapping:
    """Rule that maps a Megatron parameter of any layer or expert to the Hugging Face weights that it is made of."""

    parameter: str
    """Regular expression of the Megatron parameter's name; a capture group holds the expert's index on its process."""
    weights: tuple[str, ...]
    """Hugging Face weights of the parameter, in Megatron's order; `{layer}` and `{expert}` count from 0."""
    cut: TensorParallelCut
    layer: str = ""
    """PEFT's name of the adapted layer; if empty, the weights' names without `.weight`."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the Transformers layers that make up the Megatron parameter; empty if LoRA cannot adapt them."""
        weights = tuple(name.removesuffix(".weight") for name in self.weights if name.endswith(".weight"))
        # Norms and embeddings are `WHOLE` or `VOCABULARY` without a layer name: LoRA adapts none of them.
        return (
            (self.layer,)
            if self.layer
            else weights
            if self.cut in (TensorParallelCut.QKV, TensorParallelCut.GATED, TensorParallelCut.COLUMNS)
            else ()
        )

    @property
    def of_experts(self) -> bool:
        """True if each expert has a parameter of its own."""
        return "{expert}" in self.weights[0]


def _in_layer(parameter: str, *weights: str, cut: TensorParallelCut, layer: str = "") -> WeightMapping:
    return WeightMapping(
        parameter, tuple(LAYER_PREFIX + weight for weight in weights), cut, layer and LAYER_PREFIX + layer
    )


MODEL = (
    WeightMapping(r"embedding\.word_embeddings\.weight", (EMBEDDING,), TensorParallelCut.VOCABULARY),
    WeightMapping(r"decoder\.final_layernorm\.weight", ("model.norm.weight",), TensorParallelCut.WHOLE),
    WeightMapping(r"output_layer\.weight", (HEAD,), TensorParallelCut.VOCABULARY),
)
QKV_NAMES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION = (
    _in_layer(
        r"(input_layernorm\.|self_attention\.linear_qkv\.layer_norm_)weight",
        "input_layernorm.weight",
        cut=TensorParallelCut.WHOLE,
    ),
    _in_layer(
        r"self_attention\.linear_qkv\.weight", *(f"{name}.weight" for name in QKV_NAMES), cut=TensorParallelCut.QKV
    ),
    _in_layer(r"self_attention\.linear_qkv\.bias", *(f"{name}.bias" for name in QKV_NAMES), cut=TensorParallelCut.QKV),
    _in_layer(r"self_attention\.q_layernorm\.weight", "self_attn.q_norm.weight", cut=TensorParallelCut.WHOLE),
    _in_layer(r"self_attention\.k_layernorm\.weight", "self_attn.k_norm.weight", cut=TensorParallelCut.WHOLE),
    _in_layer(r"self_attention\.linear_proj\.weight", "self_attn.o_proj.weight", cut=TensorParallelCut.COLUMNS),
    _in_layer(
        r"(pre_mlp_layernorm\.|mlp\.linear_fc1\.layer_norm_)weight",
        "post_attention_layernorm.weight",
        cut=TensorParallelCut.WHOLE,
    ),
)
FEED_FORWARD = (
    _in_layer(r"mlp\.linear_fc1\.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", cut=TensorParallelCut.GATED),
    _in_layer(r"mlp\.linear_fc2\.weight", "mlp.down_proj.weight", cut=TensorParallelCut.COLUMNS),
)
# Local experts are modules with a number; Transformer Engine's grouped layer has numbered weights.
EXPERT = r"mlp\.experts\.(?:local_experts\.(\d+)\.{matrix}\.weight|{matrix}\.weight(\d+))"


def _experts(block: str, *, gate: str, up: str, down: str) -> tuple[WeightMapping, ...]:
    """Return the rules for a mixture-of-experts layer's router and experts. block, gate, up, down: names in the files.

    In the Transformers model, and to PEFT, all experts of a layer are two parameters, of which down is wrapped last.
    """
    inward = (f"{block}.experts.{{expert}}.{matrix}.weight" for matrix in (gate, up))
    return (
        _in_layer(r"mlp\.router\.weight", f"{block}.gate.weight", cut=TensorParallelCut.WHOLE, layer="mlp.gate"),
        _in_layer(
            EXPERT.replace("{matrix}", "linear_fc1"),
            *inward,
            cut=TensorParallelCut.GATED,
            layer="mlp.experts.base_layer",
        ),
        _in_layer(
            EXPERT.replace("{matrix}", "linear_fc2"),
            f"{block}.experts.{{expert}}.{down}.weight",
            cut=TensorParallelCut.COLUMNS,
            layer="mlp.experts",
        ),
    )


DENSE = (*MODEL, *ATTENTION, *FEED_FORWARD)

MAPPINGS: dict[str, tuple[WeightMapping, ...]] = {
    "llama": DENSE,
    "mistral": DENSE,
    "mixtral": (*MODEL, *ATTENTION, *_experts("block_sparse_moe", gate="w1", up="w3", down="w2")),
    "qwen2": DENSE,
    "qwen3": DENSE,
    "qwen3_moe": (*DENSE, *_experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")),
}


def rules_of(family: str) -> tuple[WeightMapping, ...]:
    """Return the rules that map a model family's weights and LoRA to Megatron; ModelError for an unknown family."""
    check_family(family)
    rules = MAPPINGS[family]
    return (*rules, *(factor for rule in rules for factor in _factors(rule)))


def factor_name(layer: str, factor: str) -> str:
    """Return the parameter name of a layer's LoRA factor `A` or `B` in a Transformers model adapted by PEFT."""
    return f"{layer}.lora_{factor}.default.weight"


def expert_layer(layer: str, expert: int | str) -> str:
    """Return our name for one expert in a layer that holds all experts: the layer's name and the expert's index."""
    return f"{layer}.{expert}"


def _factors(rule: WeightMapping) -> Iterator[WeightMapping]:
    """Yield the rules that map LoRA factors of a Megatron layer to those of PEFT.

    B is split like the rows of the layer's weight, A like its columns; a fused layer has factors for each.
    """
    layers = [expert_layer(name, "{expert}") for name in rule.layers] if rule.of_experts else rule.layers
    cuts = {
        TensorParallelCut.COLUMNS: (TensorParallelCut.COLUMNS, TensorParallelCut.WHOLE),
        TensorParallelCut.WHOLE: (TensorParallelCut.WHOLE, TensorParallelCut.WHOLE),
    }.get(
        rule.cut,
        (TensorParallelCut.WHOLE, TensorParallelCut.HALVES)
        if rule.of_experts
        else (TensorParallelCut.STACKED, rule.cut),
    )
    for factor, cut in zip("AB", cuts if layers else (), strict=False):
        parameter = rule.parameter.replace("weight", f"lora_{factor}")
        yield WeightMapping(parameter, tuple(factor_name(layer, factor) for layer in layers), cut)
