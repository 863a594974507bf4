"""Peak device memory of a rank, by pipeline stage and by part. Pure.

Weights, gradients and optimizer follow Rajbhandari et al. 2020 (ZeRO, section 3.1); activations Korthikanti et al.
2022 ("Reducing activation recomputation in large transformer models", equations 1 to 5), written for grouped queries,
gated feed-forward layers and mixtures of experts. With its GPT (s tokens, b rows, h wide, a heads, t-way tensor
parallel) that paper's s·b·h·(10 + 24/t + 5·a·s/(h·t)) comes out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from stages.models.shape import ModelShape
from stages.parallel.layout import EngineName, Layout
from stages.planner.hardware import Efficiency
from stages.planner.partition import (
    PipelineStage,
    adapter_parameters,
    optimizer_parameters,
    outside_parameters,
    pipeline_stages,
    rank_parameters,
)
from stages.planner.workload import Software, Workload, our_software

GIB = 2**30
LOGITS_CHUNK = 2**27
"""Logits alive at a time where they are chunked; see `stages.engines.log_probabilities`."""


@dataclass(frozen=True)
class StageMemory:
    """GiB of one rank of a pipeline stage."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Kept for the backward pass, by all micro-batches in flight."""
    workspace: float
    """Of the layer at work: recomputed activations, gradients of activations."""
    logits: float
    communication: float
    """Gathered parameters, buffers of messages."""
    runtime: float
    """Driver, libraries, communicators, fragmentation."""

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class MemoryEstimate:
    """GiB by pipeline stage: all of them, or only the first and the last, which one of is the fullest."""

    stages: tuple[StageMemory, ...]

    @property
    def worst(self) -> StageMemory:
        """The fullest stage."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def peak_gib(self) -> float:
        """Memory of the fullest stage's ranks."""
        return self.worst.total


@dataclass(frozen=True)
class _Case:
    """What all parts of the estimate depend on."""

    shape: ModelShape
    engine: EngineName
    layout: Layout
    workload: Workload
    software: Software

    @property
    def micro_batches(self) -> int:
        return max(
            1, self.workload.global_batch_size // (self.layout.micro_batch_size * self.layout.data_parallel_size)
        )

    @property
    def tokens(self) -> float:
        """Of a micro-batch, on one rank."""
        return self.layout.micro_batch_size * self.workload.sequence_length / self.layout.cp


def memory(
    shape: ModelShape,
    engine: EngineName,
    layout: Layout,
    workload: Workload,
    *,
    software: Software | None = None,
    efficiency: Efficiency | None = None,
    every_stage: bool = True,
) -> MemoryEstimate:
    """Estimate the peak of every pipeline stage (`every_stage=False`: of the first and the last)."""
    case = _Case(shape, engine, layout, workload, software or our_software(engine, layout))
    stages = pipeline_stages(shape.num_layers, layout.pp, case.software.balances_head)
    chosen = stages if every_stage or len(stages) < 3 else _fullest(stages)
    return MemoryEstimate(tuple(_stage(case, stage, efficiency or Efficiency()) for stage in chosen))


def _fullest(stages: tuple[PipelineStage, ...]) -> tuple[PipelineStage, ...]:
    """Stages one of which is the fullest: early ones hold most micro-batches, the last one logits."""
    if stages[0].num_layers >= stages[1].num_layers:
        return stages[0], stages[-1]
    return stages[0], stages[1], stages[-1]


def _stage(case: _Case, stage: PipelineStage, efficiency: Efficiency) -> StageMemory:
    weights, gradients, optimizer = _model_states(case, stage)
    activations = _kept_activations(case, stage)
    workspace = case.tokens * _workspace_per_token(case)
    logits = _logits(case) if stage.has_head else 0.0
    communication = _communication(case, stage)
    parts = [weights, gradients, optimizer, activations, workspace, logits, communication]
    layout = case.layout
    degrees = (layout.tp, layout.pp, layout.cp, layout.ep, layout.data_parallel_size)
    num_groups = sum(degree > 1 for degree in degrees)
    held_gib = efficiency.runtime_gib + num_groups * efficiency.communicator_gib
    runtime = held_gib * GIB + efficiency.fragmentation * sum(parts)
    return StageMemory(*(part / GIB for part in (*parts, runtime)))


def _model_states(case: _Case, stage: PipelineStage) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer."""
    layout = case.layout
    held = rank_parameters(case.shape, stage, layout.tp, layout.ep, layout.etp)
    sharded = optimizer_parameters(held, layout, case.engine)
    if case.engine == "fsdp":
        return _fsdp_states(case, sharded)
    weight_bytes = {"fp32": 4, "bf16": 2, "fp8": 2}[case.workload.precision]  # fp8: as they are, and transposed
    optimizer_bytes = 8 if case.workload.precision == "fp32" else case.software.optimizer_bytes
    trained, trained_sharded = held.total, sharded
    if case.workload.lora_rank:
        trained = stage.num_layers * adapter_parameters(case.shape, case.workload.lora_rank, layout.tp)
        trained_sharded = trained / layout.optimizer_shards
    in_precision = case.software.gradient_bytes + case.software.gradient_copy_bytes
    gradient_bytes = 4 if case.workload.precision == "fp32" else in_precision
    return held.total * weight_bytes, trained * gradient_bytes, trained_sharded * optimizer_bytes


def _fsdp_states(case: _Case, sharded: float) -> tuple[float, float, float]:
    """fp32 everywhere, all sharded; under LoRA the frozen weights are in the compute precision."""
    if case.layout.cpu_offload:
        return 0.0, 0.0, 0.0
    rank = case.workload.lora_rank
    if rank is None:
        return 4 * sharded, 4 * sharded, 8 * sharded
    trained = case.shape.num_layers * adapter_parameters(case.shape, rank) / case.layout.dp_shard
    return case.workload.compute_bytes * sharded + 4 * trained, 4 * trained, 8 * trained


def _kept_activations(case: _Case, stage: PipelineStage) -> float:
    in_flight = _layers_in_flight(case, stage)
    per_layer = case.tokens * kept_bytes_per_token(case.shape, case.engine, case.layout, case.workload, case.software)
    return in_flight * per_layer


def _layers_in_flight(case: _Case, stage: PipelineStage) -> float:
    """Layers × micro-batches that wait for their backward pass: 1F1B, or interleaved (Narayanan et al. 2021)."""
    layout = case.layout
    after = layout.pp - stage.index - 1
    if layout.vpp == 1:
        return stage.num_layers * min(case.micro_batches, after + 1)
    chunks = 2 * after + (layout.vpp - 1) * layout.pp + 1
    return stage.num_layers / layout.vpp * min(case.micro_batches * layout.vpp, chunks)


def kept_bytes_per_token(
    shape: ModelShape, engine: EngineName, layout: Layout, workload: Workload, software: Software
) -> float:
    """Bytes a token leaves in one layer for the backward pass, on one rank. In fp8, products keep their inputs so."""
    size, hidden = workload.compute_bytes, shape.hidden_size
    along_sequence = layout.tp if layout.sequence_parallel else 1
    checkpoint = hidden * size / (layout.tp if software.shards_checkpoints else along_sequence)
    if layout.recompute == "full":
        return checkpoint
    if layout.recompute == "selective" and engine == "fsdp":
        return checkpoint + _products_per_token(shape, size, software.kept_products)
    into_products = 1 if workload.precision == "fp8" else size
    unsplit = 2 * hidden * (size + into_products) + (2 * hidden if software.dropout else 0)
    unsplit += 0 if software.fused_elementwise else 2 * 4 * hidden
    split = _ffn_bytes_per_token(shape, size, into_products, software)
    split += size * (2 * shape.query_width + 2 * shape.kv_width)
    split += shape.query_width if workload.precision == "fp8" else 0
    split += size * (shape.query_width + shape.kv_width) if shape.qk_norm else 0
    if not software.flash_attention and layout.recompute == "none":
        split += shape.num_heads * workload.sequence_length * (5 if software.dropout else 2)
    return unsplit / along_sequence + split / layout.tp


def _products_per_token(shape: ModelShape, size: int, kept: float) -> float:
    """Results of matrix products and attention, which the FSDP engine's selective recomputation keeps."""
    ffn = (2 if shape.gated_ffn else 1) * _ffn_width(shape) + shape.hidden_size
    products = shape.query_width + 2 * shape.kv_width + shape.hidden_size + ffn
    return size * (shape.query_width + kept * products)


def _ffn_width(shape: ModelShape) -> float:
    """Feed-forward width that a token goes through, averaged over layers."""
    mixture = shape.num_mixture_layers / shape.num_layers
    return (1 - mixture) * shape.ffn_size + mixture * shape.experts_per_token * shape.expert_ffn_size


def _ffn_bytes_per_token(shape: ModelShape, size: int, into_products: int, software: Software) -> float:
    """What comes out of the first product, what goes into the second, and tokens dispatched to experts."""
    kept = size * ((2 if shape.gated_ffn else 1) + (0 if software.fused_elementwise else 1)) + into_products
    dispatched = 2 * size * shape.experts_per_token * shape.hidden_size if shape.num_experts else 0
    return kept * _ffn_width(shape) + dispatched


def _workspace_per_token(case: _Case) -> float:
    """Bytes a token takes in the layer at work: what was not kept of it, and the widest gradients."""
    layout, size = case.layout, case.workload.compute_bytes
    nothing_recomputed = layout.model_copy(update={"recompute": "none"}) if layout.recompute != "none" else layout
    arguments = (case.workload, case.software)
    whole = kept_bytes_per_token(case.shape, case.engine, nothing_recomputed, *arguments)
    kept = kept_bytes_per_token(case.shape, case.engine, layout, *arguments)
    gathered = 2 * case.shape.hidden_size
    widest = (2 if case.shape.gated_ffn else 1) * _ffn_width(case.shape) / layout.tp
    return max(0.0, whole - kept) + size * (gathered + widest)


def _logits(case: _Case) -> float:
    """Logits, their fp32 copy and its gradient; where they are chunked, three fp32 chunks and the head's gradient."""
    logits = case.tokens * case.shape.vocab_size / case.layout.tp
    if case.software.chunked_logits:
        head_gradient = 4 * case.shape.embedding_parameters / case.layout.tp if logits > LOGITS_CHUNK else 0
        return 12 * min(logits, LOGITS_CHUNK) + head_gradient
    return (case.workload.compute_bytes + 8) * logits


def _communication(case: _Case, stage: PipelineStage) -> float:
    message = case.tokens * case.shape.hidden_size * case.workload.compute_bytes
    messages = 4 * message * (case.layout.pp > 1) + 2 * message * (case.layout.tp > 1)
    return messages + (_fsdp_buffers(case, stage) if case.engine == "fsdp" else 0.0)


def _fsdp_buffers(case: _Case, stage: PipelineStage) -> float:
    """Gathered parameters (the root's stay; of layers a few at a time), and one layer's whole gradients.

    Under a pipeline all layers of the stage stay gathered, and their gradients whole, until the step is over.
    """
    layout, size = case.layout, case.workload.compute_bytes
    held = rank_parameters(case.shape, stage, layout.tp, layout.ep, layout.etp).total
    if layout.optimizer_shards == 1:
        return (size * held) if size < 4 else 0.0
    outside = outside_parameters(case.shape, stage, layout.tp)
    layer = (held - outside) / stage.num_layers
    keeps_layers = not layout.reshard_after_forward or layout.pp > 1
    alive = stage.num_layers if keeps_layers else min(stage.num_layers, 2 + layout.prefetch_layers)
    gathered = size * (alive * layer + outside)
    if case.workload.lora_rank:
        return gathered
    keeps_gradients = case.micro_batches > 1 and (case.software.gathers_gradients or layout.pp > 1)
    return gathered + 4 * (held if keeps_gradients else layer) + size * layer
