"""Training work to plan for: rows, precision, method (`Workload`), and habits of the training program (`Software`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pydantic import TypeAdapter

from stages.models.shape import ModelShape
from stages.planner.adapted import LowRank

Precision = Literal["fp32", "bf16", "fp8"]
"""Precisions that the engines train in."""
PlannedPrecision = Precision | Literal["fp4"]
"""Precisions that can be predicted, also of other programs' runs."""
OptimizerName = Literal["adamw", "muon"]


@dataclass(frozen=True)
class Passes:
    """Forward passes that a training method computes beside learning, over all rows."""

    before_training: int = 0
    """Forward passes over each row before training, such as DPO's reference."""
    each_step: float = 0
    """Forward passes over a step's rows before the model learns from them; a fraction if only some steps have one."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes that FSDP2 keeps for a parameter trained by AdamW."""

    weight: int = 4
    """Bytes of a weight, and of its gradient once sharded."""
    moments: int = 8
    """Bytes of both of Adam's moments together, of one parameter."""


@dataclass(frozen=True)
class Workload:
    """Work of one optimizer step, and of the whole training."""

    sequence_length: int
    global_batch_size: int
    """Rows of one optimizer step, over all processes."""
    precision: PlannedPrecision = "bf16"
    """bf16: master weights in fp32. fp8 and fp4: as bf16, with the layers' matrix products in 8 or 4 bits."""
    passes: Passes = Passes()
    """Forward passes of the method beside the learning one."""
    scores_documents: bool = False
    """True if the model ends in a score, not in logits over the vocabulary: a reward model."""
    adapter: LowRank | None = None
    """Adapter that is trained on the frozen model; None: the whole model is trained."""
    optimizer: OptimizerName = "adamw"
    """Optimizer; muon keeps one moment, not two, for matrices of layers (fsdp)."""
    state_bytes: StateBytes = StateBytes()
    """Bytes of weight and moments of each trained parameter (fsdp)."""
    freezes_routers: bool = False
    """True if a mixture's routers are frozen, with neither gradients nor optimizer state."""
    total_tokens: float | None = None
    """Tokens of the whole training."""

    @classmethod
    def from_json(cls, text: str) -> Workload:
        """Read a workload from the line written by `to_json`."""
        return TypeAdapter(cls).validate_json(text)

    def to_json(self) -> str:
        """Return the workload as one line of JSON, without default values."""
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
        """True if the layers' matrix products are in 8 or 4 bits."""
        return self.precision in ("fp8", "fp4")

    def trained_shape(self, shape: ModelShape) -> ModelShape:
        """Return the shape as trained: a score head has next to no parameters, so the embedding counts as tied."""
        return replace(shape, tied_embeddings=True) if self.scores_documents else shape


@dataclass(frozen=True)
class Software:
    """Habits of a training program that neither layout nor hardware describe."""

    flash_attention: bool = True
    """True if attention never writes its scores to memory (FlashAttention, Dao et al. 2022)."""
    first_flash_attention: bool = False
    """True if attention is FlashAttention 1, about half as fast as its successors (Dao 2023, section 4)."""
    fused_elementwise: bool = True
    """True if norms, activations and residuals take one pass over memory each."""
    dropout: bool = False
    fp8_attention: bool = False
    """True if matrix products inside fused attention are in 8 bits."""
    keeps_frozen_in_fp8: bool = False
    """True if, in fp8, frozen weights are stored in one byte each, not two."""
    gradient_bytes: int = 4
    """Bytes of a gradient as it is accumulated and reduced."""
    gradient_copy_bytes: int = 0
    """Bytes of a second copy of each gradient, such as bf16 beside fp32."""
    optimizer_bytes: int = 12
    """Bytes of a parameter's master weight and moments, and of anything sharded with them, unless trained in fp32."""
    overlaps_gradients: bool = True
    """True if gradients are reduced during the backward pass."""
    overlaps_layers: bool = False
    """Tensor-parallel communication overlaps with the matrix products next to it."""
    overlaps_experts: bool = False
    """Dispatch of tokens to experts and back overlaps with matrix products."""
    chunked_logits: bool = True
    """True if logits are computed for a chunk of tokens at a time."""
    fused_cross_entropy: bool = False
    """Unchunked logits are kept in 16 bits only, and their gradient overwrites them."""
    gathers_gradients: bool = True
    """FSDP with `accumulate: auto` keeps whole gradients and reduces them with the last micro-batch."""
    keeps_every_second_product: bool = False
    """Selective recomputation (fsdp) keeps the results of every second matrix product, not of all."""
    recomputed_share: float = 1.0
    """Share of the layers that full recomputation covers."""
    offloaded_share: float = 0.0
    """Share of the layers whose activations are offloaded to the host's memory, at no cost in time."""
    fp8_activation_inputs: bool = False
    """Inputs of activation functions are kept in fp8."""
    casts_at_products: bool = False
    """In fp8 or fp4, dense products cast their inputs, which are kept and gathered in 16 bits; experts compute in bf16.
    """
    cuda_graphs: bool = False
    """Steps are replayed from CUDA graphs, so kernel launches take no host time."""
    fragments_states: bool = False
    """Weights, gradients and optimizer states are one tensor each, so gaps form around them. Megatron's distributed
    optimizer uses flat buffers instead."""
    shards_checkpoints: bool = False
    """Tensor-parallel ranks share the layer inputs that full recomputation keeps."""
    balances_head: bool = False
    """Pipeline stages with the embedding or the head get fewer layers even where layers divide evenly."""
