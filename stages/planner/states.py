"""Bytes of weights, gradients and optimizer that a rank holds, and of what it gathers of them. Pure.

After Rajbhandari et al. 2020 (ZeRO, section 3.1). With an adapter the base is frozen: it has neither gradients nor
optimizer state, and is kept as `adapter.base_precision` says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stages.models.shape import ModelShape
from stages.parallel.layout import EngineName, Layout
from stages.planner.adapted import (
    frozen_bytes,
    gathered_layer_bytes,
    joined_bytes,
    learning_parameters,
    merged_experts,
)
from stages.planner.partition import (
    PipelineStage,
    RankParameters,
    optimizer_parameters,
    outside_parameters,
    rank_parameters,
)
from stages.planner.workload import Software, Workload, gathers_gradients


@dataclass(frozen=True)
class MemoryCase:
    """What all parts of the estimate depend on."""

    shape: ModelShape
    engine: EngineName
    layout: Layout
    workload: Workload
    software: Software

    @property
    def micro_batches(self) -> int:
        """Of a step, on one rank."""
        return max(
            1, self.workload.global_batch_size // (self.layout.micro_batch_size * self.layout.data_parallel_size)
        )

    @property
    def tokens(self) -> float:
        """Of a micro-batch, on one rank."""
        return self.layout.micro_batch_size * self.workload.sequence_length / self.layout.cp

    def trained(self, stage: PipelineStage) -> RankParameters:
        """Parameters that learn, of one rank of a pipeline stage before data parallelism shards them."""
        learning = learning_parameters(self.shape, self.engine, self.layout, self.workload.adapter, stage)
        mixture_layers = stage.num_layers * self.shape.num_mixture_layers / self.shape.num_layers
        frozen = mixture_layers * self.shape.router_parameters if self.workload.freezes_routers else 0.0
        return replace(learning, dense=learning.dense - frozen)


def model_states(case: MemoryCase, stage: PipelineStage) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer."""
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


def host_bytes(case: MemoryCase, stage: PipelineStage) -> float:
    """What a rank keeps in its host's memory instead of the device's: all of these, where they are offloaded."""
    if not case.layout.cpu_offload:
        return 0.0
    return sum(model_states(replace(case, layout=case.layout.model_copy(update={"cpu_offload": False})), stage))


def _fsdp_states(case: MemoryCase, stage: PipelineStage, held: float, learning: float) -> tuple[float, float, float]:
    """All sharded. held, learning: parameters of a shard, where the model learns."""
    if case.layout.cpu_offload:
        return 0.0, 0.0, 0.0
    adapter, shards, size = case.workload.adapter, case.layout.dp_shard, case.workload.state_bytes
    if adapter is None:
        matrices = _muon_matrices(case, stage) / shards
        return size.weight * held, size.weight * learning, size.moments * learning - 4 * matrices
    trained = case.trained(stage).total / shards
    frozen = frozen_bytes(case.shape, adapter, case.workload.compute_bytes) / shards
    return frozen + 4 * trained, 4 * trained, size.moments * trained


def _muon_matrices(case: MemoryCase, stage: PipelineStage) -> float:
    """Parameters of which Muon keeps one moment: all but embeddings, the head and vectors."""
    if case.workload.optimizer != "muon":
        return 0.0
    shape, layout = case.shape, case.layout
    held = rank_parameters(shape, stage, layout.tp, layout.ep, layout.etp).total
    norms = shape.norm_parameters * (2 * stage.num_layers + stage.has_head)
    positions = shape.position_parameters * stage.has_embedding
    return held - outside_parameters(shape, stage, layout.tp) - norms - positions


def fsdp_buffers(case: MemoryCase, stage: PipelineStage) -> float:
    """Gathered parameters (the root's stay; of layers a few at a time), and one layer's whole gradients.

    Under a pipeline all layers of the stage stay gathered, and their gradients whole, until the step is over.
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
    keeps_gradients = case.micro_batches > 1 and (gathers_gradients(layout, case.software) or layout.pp > 1)
    # Shards of gradients take the place of whole ones, a layer at a time; on the device they count among the states.
    shards = 0.0 if layout.cpu_offload else held / layout.dp_shard
    return gathered + 4 * (held - shards if keeps_gradients else layer) + size * layer
