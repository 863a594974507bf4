"""The linear layers of a model folder, read from the headers of its safetensors files (no torch, milliseconds).

A layer counts when it is a matrix named `….weight` that is no embedding. Layers are known by the names that the usual
architectures give them, since those names are also what serving engines split and fuse by.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from safetensors import safe_open

from stages.models.shape import ModelShape

EMBEDDINGS = re.compile(
    r"(embed_tokens|wte|wpe|word_embeddings|embed_in|tok_embeddings|embed_positions|position_embeddings)$"
)
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""Layers of the same input that serving engines load as one matrix."""
COLUMN_PARALLEL = {name for names in FUSED for name in names} | {"qkv_proj", "gate_up_proj", "fc1", "c_fc"}
ROW_PARALLEL = {"o_proj", "down_proj", "out_proj", "w2", "fc2", "dense_4h_to_h", "c_proj"}

EXPERTS = r"re:.*\.experts\."
"""All layers of experts, as a pattern for `matches`."""


class Split(Enum):
    """What tensor parallelism divides between its ranks."""

    NOTHING = "nothing"
    OUTPUT = "output"
    INPUT = "input"


@dataclass(frozen=True)
class Projection:
    """A linear layer: `output_size × input_size`, named as the module (without `.weight`)."""

    name: str
    output_size: int
    input_size: int

    @property
    def suffix(self) -> str:
        """The last part of the name, such as `down_proj`."""
        return self.name.rpartition(".")[2]

    @property
    def split(self) -> Split:
        """Column-parallel layers split their output, row-parallel ones their input; others stand whole on each rank."""
        if self.suffix in COLUMN_PARALLEL:
            return Split.OUTPUT
        return Split.INPUT if self.suffix in ROW_PARALLEL else Split.NOTHING

    @property
    def is_expert(self) -> bool:
        """Whether it is one expert's of a mixture, which have kernels of their own."""
        return ".experts." in self.name

    @property
    def fused_name(self) -> str:
        """The same for all layers that serving engines load as one matrix with this one."""
        partners = next((names for names in FUSED if self.suffix in names), (self.suffix,))
        return self.name.removesuffix(self.suffix) + "+".join(partners)


def read_projections(model_folder: Path) -> list[Projection]:
    """All linear layers of the model, `lm_head` and routers included, in the order of their names."""
    found = []
    for path in sorted(model_folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as weights:
            for key in weights.keys():  # noqa: SIM118 – not a mapping
                name = key.removesuffix(".weight")
                shape = weights.get_slice(key).get_shape()
                if name != key and len(shape) == 2 and not EMBEDDINGS.search(name):
                    found.append(Projection(name, *shape))
    return sorted(found, key=lambda projection: projection.name)


def projections_of(shape: ModelShape) -> list[Projection]:
    """Linear layers of one dense layer of Llama and its relatives, before there are files; none of other families."""
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
    """Whether a module has one of these names, or matches one of these patterns (`re:` begins a regular expression)."""
    return any(
        re.match(pattern.removeprefix("re:"), name) if pattern.startswith("re:") else pattern == name
        for pattern in patterns
    )
