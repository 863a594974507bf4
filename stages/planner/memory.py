"""Peak device memory of a rank, by pipeline stage and by part: those of `states` and `activations`, added up. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stages.models.shape import ModelShape
from stages.parallel.layout import EngineName, Layout
from stages.planner.activations import (
    kept_bytes_per_token,
    merged_experts_bytes,
    merged_experts_workspace,
    weight_workspace,
    workspace_per_token,
)
from stages.planner.adapted import first_learning_layer
from stages.planner.hardware import Efficiency
from stages.planner.partition import PipelineStage, pipeline_stages, stage_shape
from stages.planner.states import MemoryCase, fsdp_buffers, host_bytes, model_states
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
        return sum(vars(self).values())


@dataclass(frozen=True)
class MemoryEstimate:
    """GiB by pipeline stage: all of them, or only the first and the last, which one of is the fullest."""

    stages: tuple[StageMemory, ...]
    host_gib: float = 0.0
    """Of the host's memory, by each rank: what is offloaded to it."""

    @property
    def worst(self) -> StageMemory:
        """The fullest stage."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def peak_gib(self) -> float:
        """Memory of the fullest stage's ranks."""
        return self.worst.total


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
    case = MemoryCase(workload.trained_shape(shape), engine, layout, workload, software or our_software(engine, layout))
    stages = pipeline_stages(shape.num_layers, layout.pp, case.software.balances_head)
    chosen = stages if every_stage or len(stages) < 3 else _fullest(stages)
    held = tuple(_stage(case, stage, efficiency or Efficiency()) for stage in chosen)
    return MemoryEstimate(held, max(host_bytes(case, stage) for stage in chosen) / GIB)


def _fullest(stages: tuple[PipelineStage, ...]) -> tuple[PipelineStage, ...]:
    """Stages one of which is the fullest: early ones hold most micro-batches, the last one logits."""
    if stages[0].num_layers >= stages[1].num_layers:
        return stages[0], stages[-1]
    return stages[0], stages[1], stages[-1]


def _stage(case: MemoryCase, stage: PipelineStage, efficiency: Efficiency) -> StageMemory:
    if case.workload.adapter is None:  # which knows layers by their place in the model
        case = replace(case, shape=stage_shape(case.shape, stage, case.layout.vpp))
    weights, gradients, optimizer = model_states(case, stage)
    activations = _kept_activations(case, stage)
    per_token = workspace_per_token(case.shape, case.engine, case.layout, case.workload, case.software)
    workspace = case.tokens * per_token + weight_workspace(case.shape, case.workload)
    workspace += merged_experts_workspace(case.shape, case.engine, case.layout, case.workload)
    logits = _logits(case) if stage.has_head else 0.0
    communication = _communication(case, stage)
    parts = [weights, gradients, optimizer, activations, workspace, logits, communication]
    layout = case.layout
    degrees = (layout.tp, layout.pp, layout.cp, layout.ep, layout.data_parallel_size)
    num_groups = sum(degree > 1 for degree in degrees)
    held_gib = efficiency.runtime_gib + num_groups * efficiency.communicator_gib
    fragmented = sum(parts) if case.software.fragments_states else sum(parts[3:])
    runtime = held_gib * GIB + efficiency.fragmentation * fragmented
    return StageMemory(*(part / GIB for part in (*parts, runtime)))


def _kept_activations(case: MemoryCase, stage: PipelineStage) -> float:
    in_flight = _layers_in_flight(case, stage) * _share_with_gradients(case, stage)
    in_flight *= 1 - case.software.offloaded_share
    per_layer = case.tokens * kept_bytes_per_token(case.shape, case.engine, case.layout, case.workload, case.software)
    if case.layout.recompute == "none":
        per_layer += merged_experts_bytes(case.shape, case.engine, case.workload)
    return in_flight * per_layer


def _share_with_gradients(case: MemoryCase, stage: PipelineStage) -> float:
    """Of the stage's layers, those through which gradients go back."""
    if case.engine == "megatron" or case.workload.adapter is None:  # whose embedding asks for gradients
        return 1.0
    return 1 - first_learning_layer(case.shape, case.workload.adapter) / stage.num_layers


def _layers_in_flight(case: MemoryCase, stage: PipelineStage) -> float:
    """Layers × micro-batches that wait for their backward pass: 1F1B, or interleaved (Narayanan et al. 2021)."""
    layout = case.layout
    after = layout.pp - stage.index - 1
    if layout.vpp == 1:
        return stage.num_layers * min(case.micro_batches, after + 1)
    chunks = 2 * after + (layout.vpp - 1) * layout.pp + 1
    return stage.num_layers / layout.vpp * min(case.micro_batches * layout.vpp, chunks)


def _logits(case: MemoryCase) -> float:
    """Logits, their fp32 copy and its gradient; where they are chunked, three fp32 chunks and the head's gradient."""
    if case.workload.scores_documents:
        return 0.0
    logits = case.tokens * case.shape.vocab_size / case.layout.tp
    if case.software.chunked_logits:
        adapter = case.workload.adapter
        learns = logits > LOGITS_CHUNK and (adapter is None or adapter.saves("lm_head"))
        head_gradient = 4 * case.shape.embedding_parameters / case.layout.tp if learns else 0
        return 12 * min(logits, LOGITS_CHUNK) + head_gradient
    return (case.workload.compute_bytes + (0 if case.software.fused_cross_entropy else 8)) * logits


def _communication(case: MemoryCase, stage: PipelineStage) -> float:
    message = case.tokens * case.shape.hidden_size * case.workload.compute_bytes
    messages = 4 * message * (case.layout.pp > 1) + 2 * message * (case.layout.tp > 1)
    return messages + (fsdp_buffers(case, stage) if case.engine == "fsdp" else 0.0)
