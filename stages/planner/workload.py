"""What is trained, and how the training program goes about it: what layouts are compared for. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pydantic import TypeAdapter

from stages.models.shape import ModelShape
from stages.parallel.layout import EngineName, Layout
from stages.planner.adapted import LowRank

Precision = Literal["fp32", "bf16", "fp8"]
"""What the engines train in."""
PlannedPrecision = Precision | Literal["fp4"]
"""And what others do."""
OptimizerName = Literal["adamw", "muon"]


@dataclass(frozen=True)
class Passes:
    """What a training method computes beside learning from each row: forward passes of the model, over all rows."""

    before_training: int = 0
    """Of each row once, such as a reference's."""
    each_step: float = 0
    """Of a step's rows, before the model learns from them; a share where only some steps have it."""


@dataclass(frozen=True)
class StateBytes:
    """What FSDP2 keeps of a parameter that AdamW trains."""

    weight: int = 4
    """Bytes of the weight, and of its gradient once that is sharded."""
    moments: int = 8
    """Bytes of both moments."""


@dataclass(frozen=True)
class Workload:
    """One optimizer step: rows of tokens, in a precision."""

    sequence_length: int
    global_batch_size: int
    """Rows of one optimizer step, over all processes."""
    precision: PlannedPrecision = "bf16"
    """bf16: master weights in fp32; fp8: bf16, with matrix products of the layers in 8 bits; fp4: in 4 bits."""
    passes: Passes = Passes()
    """Beside the one that learns."""
    scores_documents: bool = False
    """The head gives one number, where a language model's has the vocabulary: a reward model."""
    adapter: LowRank | None = None
    """What is trained instead of the model, which is frozen."""
    optimizer: OptimizerName = "adamw"
    """muon: matrices of layers have one moment, not two (fsdp)."""
    state_bytes: StateBytes = StateBytes()
    """Of each parameter that learns (fsdp)."""
    freezes_routers: bool = False
    """Of a mixture of experts: they have neither gradients nor optimizer state."""
    total_tokens: float | None = None
    """Tokens of the whole training."""

    @classmethod
    def from_json(cls, text: str) -> Workload:
        """What `to_json` wrote."""
        return TypeAdapter(cls).validate_json(text)

    def to_json(self) -> str:
        """One line, without what is default."""
        return TypeAdapter(Workload).dump_json(self, exclude_defaults=True).decode()

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch."""
        return self.global_batch_size * self.sequence_length

    @property
    def compute_bytes(self) -> int:
        """Bytes of an activation or a gathered weight."""
        return 4 if self.precision == "fp32" else 2

    @property
    def in_few_bits(self) -> bool:
        """Whether the layers' matrix products are in 8 or 4 bits."""
        return self.precision in ("fp8", "fp4")

    def trained_shape(self, shape: ModelShape) -> ModelShape:
        """Of the model as it is trained: a head of scores has next to no parameters."""
        return replace(shape, tied_embeddings=True) if self.scores_documents else shape


@dataclass(frozen=True)
class Software:
    """What a training program does that neither its layout nor its hardware says."""

    flash_attention: bool = True
    """Attention never writes its scores (Dao et al. 2022)."""
    first_flash_attention: bool = False
    """Its first version, about half as fast as what followed (Dao 2023, section 4)."""
    fused_elementwise: bool = True
    """Norms, activations and residuals in one pass over memory each."""
    dropout: bool = False
    fp8_attention: bool = False
    """Products of fused attention are in 8 bits, too."""
    keeps_frozen_in_fp8: bool = False
    """Weights that do not learn are a byte each (in fp8), not two."""
    gradient_bytes: int = 4
    """Bytes of a gradient as it is added up and reduced."""
    gradient_copy_bytes: int = 0
    """Bytes of each gradient that are kept beside that."""
    optimizer_bytes: int = 12
    """Bytes of a parameter's master weight and moments (and what else is sharded with them), unless trained in fp32."""
    overlaps_gradients: bool = True
    """Gradients are reduced while the backward pass goes on."""
    overlaps_layers: bool = False
    """Communication of tensor parallelism runs beside the matrix products it belongs to."""
    overlaps_experts: bool = False
    """Tokens go to their experts and back beside matrix products."""
    chunked_logits: bool = True
    """Logits exist for a chunk of tokens at a time."""
    fused_cross_entropy: bool = False
    """Where they are not, they are kept in 16 bits alone, in which their gradient takes their place."""
    gathers_gradients: bool = True
    """FSDP reduces gradients with the last micro-batch only, and holds them whole until then, where `accumulate` of the
    layout is auto."""
    keeps_every_second_product: bool = False
    """Selective recomputation (fsdp) keeps the results of these only, not of all matrix products."""
    recomputed_share: float = 1.0
    """Of the layers, those that full recomputation is of."""
    offloaded_share: float = 0.0
    """Of the layers, those whose activations wait in the host's memory, which is near enough not to be waited for."""
    fp8_activation_inputs: bool = False
    """What goes into activation functions is kept in fp8."""
    casts_at_products: bool = False
    """In few bits, dense products cast what they are given: it is kept and gathered in 16, and experts multiply so."""
    cuda_graphs: bool = False
    """Kernels are launched from a recording of a step: the host sets no pace."""
    fragments_states: bool = False
    """Weights, gradients and optimizer are a tensor each (not flat buffers, as in Megatron since it has its distributed
    optimizer), and lie between what comes and goes, with its gaps."""
    shards_checkpoints: bool = False
    """Under tensor parallelism, what full recomputation keeps is spread over the ranks."""
    balances_head: bool = False
    """Pipeline stages with the embedding or the head get fewer layers, also where layers divide evenly."""


OURS: dict[EngineName, Software] = {
    "fsdp": Software(fused_elementwise=False, fragments_states=True, casts_at_products=True),
    "megatron": Software(chunked_logits=False, gathers_gradients=False),
}
"""The engines of this project. FSDP runs the layers of Transformers, whose norms are chains of operations."""


def our_software(engine: EngineName, layout: Layout) -> Software:
    """This project's engine under a layout; a compiled layer's chains are fused."""
    return replace(OURS[engine], fused_elementwise=True) if layout.compile else OURS[engine]


def gathers_gradients(layout: Layout, software: Software) -> bool:
    """Whether FSDP holds gradients whole between micro-batches."""
    return software.gathers_gradients if layout.accumulate == "auto" else layout.accumulate == "whole"
