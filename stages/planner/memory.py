"""Peak device memory of a rank, by pipeline stage and by part.

Weights, gradients and optimizer states follow Rajbhandari et al. 2020 (ZeRO, section 3.1); `activations` counts what a
layer keeps. With an adapter the base is frozen: it has neither gradients nor optimizer state, and is stored as
`adapter.base_precision` says.
"""

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
from stages.planner.adapted import (
    first_learning_layer,
    frozen_bytes,
    gathered_layer_bytes,
    joined_bytes,
    merged_experts,
)
from stages.planner.hardware import Efficiency
from stages.planner.partition import (
    PipelineStage,
    optimizer_parameters,
    outside_parameters,
    pipeline_stages,
    rank_parameters,
    stage_shape,
)
from stages.planner.step_case import StepCase
from stages.planner.workload import Software, Workload, gathers_gradients, our_software

GIB = 2**30
LOGITS_CHUNK = 2**27
"""Logits computed at a time where they are chunked; see `stages.engines.log_probabilities`."""


@dataclass(frozen=True)
class StageMemory:
    """Memory of one rank of a pipeline stage in GiB, by part."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """GiB of activations kept for the backward pass, of all micro-batches in flight."""
    workspace: float
    """GiB of recomputed activations and gradients of activations in the layer at work."""
    logits: float
    communication: float
    """GiB of gathered parameters and message buffers."""
    runtime: float
    """GiB of driver, libraries, communicators and fragmentation."""

    @property
    def total(self) -> float:
        """Total memory of all parts, in GiB."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of each pipeline stage in GiB, or only of the first and last ones, which include the fullest."""

    stages: tuple[StageMemory, ...]
    host_gib: float = 0.0
    """Host memory that each rank uses for offloading."""

    @property
    def worst(self) -> StageMemory:
        """Pipeline stage with the highest memory use."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def peak_gib(self) -> float:
        """Peak memory of a rank of the fullest stage, in GiB."""
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
    """Estimate the peak of every pipeline stage (`every_stage=False`: only of the first and last, faster)."""
    case = StepCase(workload.trained_shape(shape), engine, layout, workload, software or our_software(engine, layout))
    stages = pipeline_stages(shape.num_layers, layout.pp, case.software.balances_head)
    chosen = stages if every_stage or len(stages) < 3 else _fullest(stages)
    held = tuple(_stage(case, stage, efficiency or Efficiency()) for stage in chosen)
    return MemoryEstimate(held, max(host_bytes(case, stage) for stage in chosen) / GIB)


def _fullest(stages: tuple[PipelineStage, ...]) -> tuple[PipelineStage, ...]:
    """Return the pipeline stages that may be the fullest: the first keep most micro-batches, the last has logits."""
    if stages[0].num_layers >= stages[1].num_layers:
        return stages[0], stages[-1]
    return stages[0], stages[1], stages[-1]


def _stage(case: StepCase, stage: PipelineStage, efficiency: Efficiency) -> StageMemory:
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


def _kept_activations(case: StepCase, stage: PipelineStage) -> float:
    in_flight = _layers_in_flight(case, stage) * _share_with_gradients(case, stage)
    in_flight *= 1 - case.software.offloaded_share
    per_layer = case.tokens * kept_bytes_per_token(case.shape, case.engine, case.layout, case.workload, case.software)
    if case.layout.recompute == "none":
        per_layer += merged_experts_bytes(case.shape, case.engine, case.workload)
    return in_flight * per_layer


def _share_with_gradients(case: StepCase, stage: PipelineStage) -> float:
    """Return the share of the stage's layers that keep activations for the backward pass."""
    if case.engine == "megatron" or case.workload.adapter is None:  # whose embedding asks for gradients
        return 1.0
    return 1 - first_learning_layer(case.shape, case.workload.adapter) / stage.num_layers


def _layers_in_flight(case: StepCase, stage: PipelineStage) -> float:
    """Count layers × micro-batches waiting for their backward pass: 1F1B, or interleaved (Narayanan et al. 2021)."""
    layout, micro_batches = case.layout, int(case.micro_batches)
    after = layout.pp - stage.index - 1
    if layout.vpp == 1:
        return stage.num_layers * min(micro_batches, after + 1)
    chunks = 2 * after + (layout.vpp - 1) * layout.pp + 1
    return stage.num_layers / layout.vpp * min(micro_batches * layout.vpp, chunks)


def _logits(case: StepCase) -> float:
    """Return the bytes of logits, an fp32 copy and its gradient; chunked: 3 fp32 chunks and the head's gradient."""
    if case.workload.scores_documents:
        return 0.0
    logits = case.tokens * case.shape.vocab_size / case.layout.tp
    if case.software.chunked_logits:
        adapter = case.workload.adapter
        learns = logits > LOGITS_CHUNK and (adapter is None or adapter.saves("lm_head"))
        head_gradient = 4 * case.shape.embedding_parameters / case.layout.tp if learns else 0
        return 12 * min(logits, LOGITS_CHUNK) + head_gradient
    return (case.workload.compute_bytes + (0 if case.software.fused_cross_entropy else 8)) * logits


def _communication(case: StepCase, stage: PipelineStage) -> float:
    message = case.tokens * case.shape.hidden_size * case.workload.compute_bytes
    messages = 4 * message * (case.layout.pp > 1) + 2 * message * (case.layout.tp > 1)
    return messages + (fsdp_buffers(case, stage) if case.engine == "fsdp" else 0.0)


def model_states(case: StepCase, stage: PipelineStage) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer on one rank."""
    layout, workload = case.layout, case.workload
    held = rank_parameters(case.shape, stage, layout.tp, layout.ep, layout.etp)
    trained = case.trained(stage)
    sharded = optimizer_parameters(trained, layout, case.engine)
    if case.engine == "fsdp":
        return _fsdp_states(case, stage, optimizer_parameters(held, layout, case.engine), sharded)
    weight_bytes = 4 if workload.precision == "fp32" else 2  # in 8 and 4 bits: as they are, and transposed
    optimizer_bytes = 8 if workload.precision == "fp32" else case.software.optimizer_bytes
    in_precision = case.software.gradient_bytes + case.software.gradient_copy_bytes
    gradient_bytes = 4 if workload.precision == "fp32" else in_precision
    if workload.adapter is None:
        return held.total * weight_bytes, trained.total * gradient_bytes, sharded * optimizer_bytes
    in_eight_bits = workload.in_few_bits and case.software.keeps_frozen_in_fp8
    weights = held.total * (1 if in_eight_bits else weight_bytes) + trained.total * workload.compute_bytes
    weights += joined_bytes(case.shape, workload.adapter, stage, layout.tp, workload.compute_bytes)
    return weights, trained.total * gradient_bytes, sharded * optimizer_bytes


def host_bytes(case: StepCase, stage: PipelineStage) -> float:
    """Return the bytes that a rank offloads to its host: with `cpu_offload` all weights, gradients and optimizer
    states."""
    if not case.layout.cpu_offload:
        return 0.0
    return sum(model_states(replace(case, layout=case.layout.model_copy(update={"cpu_offload": False})), stage))


def _fsdp_states(case: StepCase, stage: PipelineStage, held: float, learning: float) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer of an FSDP shard on the device.

    held, learning: parameters of the shard, and the trainable ones of them.
    """
    if case.layout.cpu_offload:
        return 0.0, 0.0, 0.0
    adapter, shards, size = case.workload.adapter, case.layout.dp_shard, case.workload.state_bytes
    if adapter is None:
        matrices = _muon_matrices(case, stage) / shards
        return size.weight * held, size.weight * learning, size.moments * learning - 4 * matrices
    trained = case.trained(stage).total / shards
    frozen = frozen_bytes(case.shape, adapter, case.workload.compute_bytes) / shards
    return frozen + 4 * trained, 4 * trained, size.moments * trained


def _muon_matrices(case: StepCase, stage: PipelineStage) -> float:
    """Count the parameters with one Muon moment: all but embeddings, the head and vectors."""
    if case.workload.optimizer != "muon":
        return 0.0
    shape, layout = case.shape, case.layout
    held = rank_parameters(shape, stage, layout.tp, layout.ep, layout.etp).total
    norms = shape.norm_parameters * (2 * stage.num_layers + stage.has_head)
    positions = shape.position_parameters * stage.has_embedding
    return held - outside_parameters(shape, stage, layout.tp) - norms - positions


def fsdp_buffers(case: StepCase, stage: PipelineStage) -> float:
    """Return the bytes of gathered parameters (the root's, and a few layers') and of one layer's whole gradients.

    Under a pipeline, all layers of the stage stay gathered, and their gradients whole, until the step ends.
    """
    layout, size = case.layout, case.workload.compute_bytes
    held = rank_parameters(case.shape, stage, layout.tp, layout.ep, layout.etp).total
    outside = outside_parameters(case.shape, stage, layout.tp)
    keeps_layers = not layout.reshard_after_forward or layout.pp > 1
    alive = stage.num_layers if keeps_layers else min(stage.num_layers, 2 + layout.prefetch_layers)
    if case.workload.adapter is not None:
        # What arrives is in one piece, and copied to where it is used; a process alone gathers nothing ahead.
        is_alone = layout.optimizer_shards == 1
        alive = min(alive, 2) if is_alone and not keeps_layers else alive + (not is_alone)
        if is_alone and not keeps_layers and any(merged_experts(case.shape, case.engine, case.workload.adapter)):
            alive = 1  # the copy is gone before the sum of experts and their adapter is made, which is as large
        layer = gathered_layer_bytes(case.shape, case.workload.adapter, size)
        return alive * layer + size * outside
    if layout.optimizer_shards == 1:
        return (size * held) if size < 4 else 0.0
    layer = (held - outside) / stage.num_layers
    gathered = size * (alive * layer + outside)
    keeps_gradients = int(case.micro_batches) > 1 and (gathers_gradients(layout, case.software) or layout.pp > 1)
    # Shards of gradients take the place of whole ones, a layer at a time; on the device they count among the states.
    shards = 0.0 if layout.cpu_offload else held / layout.dp_shard
    return gathered + 4 * (held - shards if keeps_gradients else layer) + size * layer
