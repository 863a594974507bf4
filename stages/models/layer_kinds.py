"""Kinds of layers of a model, as a walk through it measures them (`walk`); needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property
from typing import Any, Literal

from stages.models.flops import AttentionWork

PlannedSplit = Literal["columns", "rows", "gathered", "cut rows"]
"""Split of a matrix by Transformers' plan of tensor parallelism: by its results, or by its inputs, whose products are
then summed over processes. "gathered": by results of which each process gets all; "cut rows": by inputs of which each
process has all, and takes its part."""
STYLES: dict[str, PlannedSplit] = {
    "gather_output": "gathered",
    "split_input": "cut rows",
    "colwise": "columns",
    "rowwise": "rows",
}
"""Split of a matrix by a part of the name that Transformers' plans have for it; the first that is found counts."""


class LayerRole(Enum):
    """Place of a linear layer in a transformer layer; layers of one have the same input, and one matrix in Megatron."""

    INTO_ATTENTION = "into attention"
    OUT_OF_ATTENTION = "out of attention"
    INTO_FFN = "into the feed-forward part"
    OUT_OF_FFN = "out of the feed-forward part"

    @classmethod
    def of(cls, name: str, inputs: int, outputs: int, hidden_size: int) -> "LayerRole":
        """Return a linear layer's place, by its name and by whether it leads back to the width between layers."""
        is_out = outputs == hidden_size and (inputs != hidden_size or name.rpartition(".")[2].startswith(("o", "down")))
        if any(part in name for part in ("mlp", "feed_forward", "ffn", "expert", "fc", "moe")):
            return cls.OUT_OF_FFN if is_out else cls.INTO_FFN
        return cls.OUT_OF_ATTENTION if is_out else cls.INTO_ATTENTION

    @property
    def cuts_inputs(self) -> bool:
        """Return whether tensor parallelism cuts a layer's inputs rather than its outputs."""
        return self in (LayerRole.OUT_OF_ATTENTION, LayerRole.OUT_OF_FFN)


@dataclass(frozen=True)
class Linear:
    """Linear layer of a Transformers model: its name, its place in the transformer layer, and its sizes."""

    name: str
    place: LayerRole
    inputs: int
    outputs: int
    source: int | None = None
    """Number of its input among those of the transformer layer's linear layers, where a walk has seen it."""
    keeps_input: bool = False
    """True if the backward pass needs its input only for the gradient of its weight, as far as a walk has seen."""
    split: PlannedSplit | None = None
    """Split of its weight; None: it is whole on each process."""

    def sizes(self, tp: int) -> tuple[float, float]:
        """Return the inputs and outputs of the part of its weight that one of `tp` processes has."""
        return _part(self, tp)


@dataclass(frozen=True)
class StackedParameter:
    """Parameter in a mixture-of-experts layer: one matrix [outputs, inputs] per expert, or the router's matrix."""

    name: str
    place: LayerRole
    inputs: int
    outputs: int
    num_experts: int
    is_router: bool = False
    split: PlannedSplit | None = None
    has_bias: bool = False

    def sizes(self, tp: int) -> tuple[float, float]:
        """Return the inputs and outputs of the part of each matrix that one of `tp` processes has."""
        return _part(self, tp)


def _part(matrix: Linear | StackedParameter, tp: int) -> tuple[float, float]:
    inputs, outputs = matrix.inputs, matrix.outputs
    if matrix.split is None:
        return inputs, outputs
    return (inputs / tp, outputs) if "rows" in matrix.split else (inputs, outputs / tp)


@dataclass(frozen=True)
class Attention:
    """Attention over pairs of tokens in one layer. window_tokens: size of its sliding window; None: none."""

    num_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    window_tokens: int | None = None

    @property
    def work(self) -> AttentionWork:
        return AttentionWork(self.num_heads * (self.key_width + self.value_width), self.window_tokens)


@dataclass(frozen=True)
class KeptBytes:
    """Bytes of activations per token that a layer keeps for its backward pass, where it learns and where it is frozen.

    by_scores: bytes for each token and each token of its row, of attention that stores its scores. for_a_moment: bytes
    per token of the largest tensor that is made on the way, outside split matrices. split: shares of the first two
    between matrices that a plan splits, of which each process of tensor parallelism has its part, and the bytes of the
    largest tensor there.
    """

    trained: float
    frozen: float
    by_scores: float = 0.0
    for_a_moment: float = 0.0
    split_trained: float = 0.0
    split_frozen: float = 0.0
    split_for_a_moment: float = 0.0


@dataclass(frozen=True)
class LayerKind:
    """Layers of a model with the same modules and settings, and the sizes of one."""

    layers: tuple[int, ...]
    """Numbers of the layers in the model's order, from 0."""
    prefix: str
    """Name of the list that holds the layers in the model."""
    offset: int
    """Number of the model's layers before that list."""
    num_parameters: int
    """Number of parameters without routed experts; what several layers share counts in the first."""
    num_expert_parameters: int
    """Number of parameters of all routed experts together."""
    experts_per_token: int
    """Number of routed experts that a token is sent to; 0: the layer has none."""
    experts_computed: int
    """Number of routed experts that compute on a token: some code sends it to all of them, and drops most results."""
    products: float
    """Number of weights that a token is multiplied by in a forward pass; of routed experts, those that it is sent to.
    """
    state_products: float
    """Number of multiplications per token in products without weights, outside attention over pairs: of a state."""
    attention: tuple[Attention, ...]
    linears: tuple[Linear, ...]
    """Linear layers, by their names in the layer."""
    stacked: tuple[StackedParameter, ...]
    """Parameters of routed experts, by their names in the layer."""
    kept_bf16: KeptBytes
    kept_fp32: KeptBytes
    num_split_parameters: int = 0
    """Number of parameters without routed experts that a plan of tensor parallelism splits."""
    carries_state: bool = False
    """True if tokens get something from those before them by other ways than attention, such as a convolution."""
    ends_in_sum: bool = False
    """True if the last weight is one whose products are summed over processes: no norm needs the sum (as OLMo 2's)."""

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, one.name) for one in fields(self)))

    def __hash__(self) -> int:
        """Return a hash that is computed once, since a search for layouts asks for it 100,000 times."""
        return self._hash

    def kept(self, bytes_per_value: int) -> KeptBytes:
        return self.kept_fp32 if bytes_per_value == 4 else self.kept_bf16

    @property
    def experts(self) -> tuple[StackedParameter, ...]:
        return tuple(one for one in self.stacked if not one.is_router)

    def name_of(self, layer: int) -> str:
        return f"{self.prefix}.{layer - self.offset}"


def splits_heads(plan: Mapping[str, str], layers: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a plan of tensor parallelism splits layers, and of their weights all that are by heads.

    Plans leave whole norms with a row for each head, and the code of attention does not read split vectors. layers:
    tensors of each by their names.
    """
    weights = [(f"layers.*.{name}", one.ndim) for layer in layers for name, one in layer.items()]
    is_left = any(ndim > 1 if "norm" in name else ndim == 1 and name in plan for name, ndim in weights)
    return any("layers." in name for name in plan) and not is_left


def is_expert(name: str) -> bool:
    """Return whether a weight of a layer is one of its routed experts."""
    return "experts" in name.split(".")
