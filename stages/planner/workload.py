"""Training workload to plan for (`Workload`), and the training program that runs it (`ProgramTraits`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pydantic import TypeAdapter

from stages.models.media import ModelPart
from stages.models.shape import ModelShape
from stages.models.tower import Tower
from stages.parallel.engines.rules import Feature
from stages.planner.adapted import PlannedAdapter, merged_experts, with_whole_layers

Precision = Literal["fp32", "bf16", "fp8"]
PlannedPrecision = Precision | Literal["fp4"]
"""Precisions for which the planner can predict, including fp4, which only other training programs use."""
GIB = 2**30
OptimizerName = Literal["adamw", "muon"]


@dataclass(frozen=True)
class ExtraPasses:
    """Additional forward passes that a training method computes, such as those of a reference model."""

    before_training: int = 0
    """Number of forward passes over each row before training, such as those of DPO's reference model."""
    each_step: float = 0
    """Number of forward passes over a step's rows before the model learns; a fraction: only in some steps."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes that FSDP2 stores per parameter trained by AdamW, for its weight and its moments."""

    weight: int = 4
    """Bytes of a stored weight; its sharded gradient takes as many."""
    moments: int = 8
    """Bytes of both of Adam's moments together, per parameter."""


@dataclass(frozen=True)
class RowMedia:
    """Pictures, or sounds, of packed rows, by the patches that a tower makes of them (`stages.models.tower`)."""

    most_patches: int
    """Number of patches of all these media of a row, of the row that has most."""
    mean_patches: float
    """Number of patches of all these media of a row, on average."""
    medium_patches: float | None = None
    """Number of patches of a medium, on average; None: as of one of a usual size."""
    part: ModelPart = "vision_tower"
    """Tower of these media."""

    def each(self, tower: Tower) -> float:
        """Return the number of patches of a medium, on average."""
        return self.medium_patches or tower.usual_patches

    def of_row(self, tower: Tower) -> tuple[float, ...]:
        """Return the number of patches of each medium of an average row, of which the last may be a part of one."""
        each = self.each(tower)
        whole, rest = divmod(self.mean_patches, each)
        return (each,) * int(whole) + ((rest,) if rest else ())


@dataclass(frozen=True)
class Workload:
    """Work of one optimizer step (rows, precision, method, adapter), and the total tokens of a training."""

    sequence_length: int
    global_batch_size: int
    """Number of rows per optimizer step, over all processes."""
    precision: PlannedPrecision = "bf16"
    """Precision of training: bf16 with fp32 master weights; fp8 and fp4 with layers' products in 8 or 4 bits."""
    passes: ExtraPasses = ExtraPasses()
    """Forward passes that the training method computes beside the one that is followed by a backward pass."""
    scores_documents: bool = False
    """True if the model ends in a single score instead of logits over the vocabulary, as a reward model does."""
    predicts_ahead: bool = False
    """True if a layer like the last one, with the head once more, learns to predict the token after the next."""
    adapter: PlannedAdapter | None = None
    """Adapter that is trained while the base model is frozen; None: the whole model is trained."""
    optimizer: OptimizerName = "adamw"
    """Optimizer; muon keeps one moment instead of two for the layers' matrices (FSDP engine only)."""
    state_bytes: StateBytes = StateBytes()
    """Bytes of weight and moments per trained parameter (FSDP engine only)."""
    frozen: tuple[ModelPart, ...] = ()
    """Parts of a model that reads media which do not learn; the tower of one that reads text alone does not either."""
    media: tuple[RowMedia, ...] = ()
    """Media of the rows, by tower; (): the rows are text."""
    freezes_routers: bool = False
    """True if the routers of a mixture of experts are frozen, with neither gradients nor optimizer state."""
    even_rows: bool = True
    """True if every forward pass has rows of one length, as packed rows have and sampled completions have not."""
    packs: bool = True
    """False if each document is a row of its own, of its own length."""
    replays_experts: bool = False
    """True if experts are those that the old policy's routers chose."""
    total_tokens: float | None = None
    """Number of tokens that the whole training processes, if known."""

    @classmethod
    def from_json(cls, text: str) -> Workload:
        return TypeAdapter(cls).validate_json(text)

    def to_json(self) -> str:
        return TypeAdapter(Workload).dump_json(self, exclude_defaults=True).decode()

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length

    @property
    def compute_bytes(self) -> int:
        """Bytes of an activation value or a gathered weight."""
        return 4 if self.precision == "fp32" else 2

    @property
    def in_few_bits(self) -> bool:
        """True if the layers' matrix products run in 8 or 4 bits."""
        return self.precision in ("fp8", "fp4")

    def features(self, shape: ModelShape | None = None) -> dict[Feature, str]:
        """Return the features that the training uses, as a recipe asks for them.

        shape: the model's, which tells whether an adapter is on experts; None if it is not known.
        """
        adapter, states = self.adapter, StateBytes()
        is_quantized, on_experts = (
            adapter and adapter.is_quantized,
            adapter and shape and merged_experts(shape, adapter),
        )
        asked: dict[Feature, tuple[object, str]] = {
            "fp8": (self.precision == "fp8", "`precision: fp8`"),
            "fp32": (self.precision == "fp32", "`precision: fp32`"),
            "muon": (self.optimizer == "muon", "`optimizer.name: muon`"),
            "fewer_bits_adamw": (self.state_bytes != states, "`optimizer` in bf16"),
            "stochastic_rounding": (self.state_bytes.weight < states.weight, "`optimizer.bf16_stochastic_round`"),
            "score_head": (self.scores_documents, "`method: reward`"),
            "mtp_loss": (self.predicts_ahead, "`mtp_loss_weight`"),
            "media": (self.media, "data with media"),
            "frozen_parts": (self.frozen, "`freeze`"),
            "frozen_routers": (self.freezes_routers, "`moe.freeze_router`"),
            "unpacked_rows": (not self.packs, "`data.packing: false`"),
            "adapter": (adapter, "`adapter`"),
            "adapted_experts": (on_experts, "`adapter` on experts"),
            "quantized_base": (is_quantized, f"`adapter.base_precision: {adapter and adapter.base_precision}`"),
            "eva": (adapter and adapter.init == "eva", "`adapter.init: eva`"),
            "replay_experts": (self.replays_experts, "`replay_experts`"),
        }
        return {feature: option for feature, (is_used, option) in asked.items() if is_used}

    def trained_shape(self, shape: ModelShape) -> ModelShape:
        """Return the trained model's shape, with its towers where rows have media, and as an adapter leaves its plan.

        A reward model's tiny score head counts as tied to the embedding.
        """
        if self.adapter and shape.kinds:
            shape = with_whole_layers(shape, self.adapter)
        if self.media and shape.towers:
            shape = replace(shape, other_parameters=shape.towers[0].other_parameters)
        if self.predicts_ahead:
            return shape.with_another_layer()
        return replace(shape, tied_embeddings=True) if self.scores_documents else shape

    def learns(self, part: ModelPart) -> bool:
        """Return whether a part of the model learns: with an adapter none, and no tower whose media rows lack."""
        parts = {"language_model", *(one.part for one in self.media), *(["projector"] if self.media else [])}
        return not self.adapter and part in parts and part not in self.frozen

    def media_by_tower(self, shape: ModelShape) -> list[tuple[Tower, RowMedia]]:
        """Return the towers that the rows' media pass, each with those media."""
        return [(tower, one) for tower in shape.towers for one in self.media if one.part == tower.part]


@dataclass(frozen=True)
class ProgramTraits:
    """Behaviour of a training program that neither its layout nor its hardware describes, such as fused kernels."""

    flash_attention: bool = True
    """True if attention never writes its scores to memory (FlashAttention, Dao et al. 2022)."""
    first_flash_attention: bool = False
    """True if attention is FlashAttention 1, about half as fast as its successors (Dao 2023, section 4)."""
    fused_elementwise: bool = True
    """True if norms, activation functions and residuals each take a single pass over memory."""
    compiled_layers: bool = False
    """True if torch compiles each layer as one graph."""
    dropout: bool = False
    fp8_attention: bool = False
    """True if fused attention computes its matrix products in 8 bits."""
    keeps_frozen_in_fp8: bool = False
    """True if, in fp8, frozen weights are stored in one byte each instead of two."""
    gradient_bytes: int = 4
    """Bytes of a gradient as it is accumulated and reduced."""
    gradient_copy_bytes: int = 0
    """Bytes of a second copy of each gradient, such as one in bf16 beside fp32; 0: no copy."""
    optimizer_bytes: int = 12
    """Bytes per trained parameter of master weight, moments and what is sharded with them; not for fp32 training."""
    overlaps_gradients: bool = True
    """True if gradients are reduced while the backward pass still runs."""
    overlaps_layers: bool = False
    """True if tensor-parallel communication overlaps with the matrix products next to it."""
    overlaps_experts: bool = False
    """True if dispatching tokens to experts and back overlaps with matrix products."""
    chunked_logits: bool = True
    fused_cross_entropy: bool = False
    """True if logits that are not chunked are kept in 16 bits only, and their gradient overwrites them."""
    keeps_logits: bool = False
    """True if logits that are not chunked last until the step's end, beside their gradient, a tensor of its own."""
    gathers_gradients: bool = True
    """True if FSDP with `accumulate: auto` keeps unsharded gradients and reduces them only in the last micro-batch."""
    separate_embedding: bool = True
    """True if FSDP gathers the input embedding as a group of its own, False if together with the head."""
    keeps_every_second_product: bool = False
    """True if selective recomputation (FSDP engine) keeps the result of every second matrix product instead of all."""
    asks_python: bool = False
    """True if selective recomputation (FSDP engine) asks Python about each operation, whose result it may keep."""
    recomputed_share: float = 1.0
    """Share of layers to which full recomputation applies."""
    offloaded_share: float = 0.0
    """Share of layers whose activations are offloaded to host memory, assumed to cost no time."""
    fp8_activation_inputs: bool = False
    casts_at_products: bool = False
    """True if fp8 and fp4 apply within dense products only: inputs are kept in 16 bits, experts compute in bf16."""
    cuda_graphs: bool = False
    """True if steps are replayed from CUDA graphs, so that kernel launches take no host time."""
    fragments_states: bool = False
    """True if weights, gradients and optimizer states are separate tensors with gaps (Megatron: flat buffers)."""
    shards_checkpoints: bool = False
    """True if tensor-parallel ranks each keep only a share of the layer inputs that full recomputation keeps."""
    balances_head: bool = False
    """True if pipeline stages with the embedding or the head get fewer layers even where layers divide evenly."""


@dataclass(frozen=True)
class ColocatedServer:
    """Sampling server on the training's devices, each of which holds a part of one of its copies of the model.

    kv_cache_gib: on each device, where the recipe sets it. num_tokens: most of a prompt and its completion.
    has_reference: whether the training keeps the start model's weights, too.
    """

    tensor_parallel_size: int
    bytes_per_number: int
    num_tokens: int
    kv_cache_gib: float | None = None
    has_reference: bool = False

    def weight_bytes(self, shape: ModelShape) -> float:
        return shape.num_parameters * self.bytes_per_number / self.tensor_parallel_size

    def least_kv_cache_gib(self, shape: ModelShape) -> float:
        """Return the recipe's GiB for keys and values, or those of one request of full length: the least."""
        one = shape.kv_cache_bytes(self.num_tokens, self.bytes_per_number, self.tensor_parallel_size) / GIB
        return self.kv_cache_gib or one
