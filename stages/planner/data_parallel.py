"""Time that data parallelism adds to a step: reducing gradients, and under FSDP gathering every layer. Pure.

FSDP gathers each layer in both passes of every micro-batch (Zhao et al. 2023); Megatron's distributed optimizer reduces
gradients once a step and gathers what it has updated (Rajbhandari et al. 2020). What runs beside compute is hidden but
for a share, since it takes memory bandwidth and processors from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from stages.models.shape import ModelShape
from stages.parallel.layout import EngineName, Layout
from stages.planner import network
from stages.planner.adapted import frozen_bytes, gathered_layer_bytes, learning_parameters
from stages.planner.compute import LayerTime, LayerWork, Pass
from stages.planner.hardware import Hardware
from stages.planner.partition import PipelineStage, RankParameters, outside_parameters
from stages.planner.workload import Software, Workload, gathers_gradients


@dataclass(frozen=True)
class StepCase:
    """What all parts of a step's time depend on."""

    shape: ModelShape
    engine: EngineName
    layout: Layout
    workload: Workload
    software: Software
    hardware: Hardware

    @property
    def micro_batches(self) -> float:
        """Of a step, on one rank."""
        rows = self.layout.micro_batch_size * self.layout.data_parallel_size
        return max(1.0, self.workload.global_batch_size / rows)

    def trained(self, stage: PipelineStage) -> RankParameters:
        """Parameters that learn, of one rank of a pipeline stage before data parallelism shards them."""
        return learning_parameters(self.shape, self.engine, self.layout, self.workload.adapter, stage)

    @property
    def work(self) -> LayerWork:
        """Of a layer, in a micro-batch."""
        layout, workload = self.layout, self.workload
        return LayerWork(
            self.shape,
            layout.micro_batch_size,
            workload.sequence_length,
            workload.precision,
            layout.tp,
            layout.cp,
            layout.ep,
            layout.etp,
            layout.sequence_parallel,
            workload.adapter is not None,
        )


def exposed_s(case: StepCase, communication_s: float, compute_s: float) -> float:
    """What is left of communication beside this much compute."""
    return communication_s - case.hardware.efficiency.overlapped * min(communication_s, compute_s)


def data_parallel_s(case: StepCase, stage: PipelineStage, layer: LayerTime, head: Pass, recompute_s: float) -> float:
    """What of it is not hidden beside compute."""
    if case.engine == "fsdp":
        return _fsdp_s(case, stage, layer, head, recompute_s)
    return _gradient_reduction_s(case, stage, layer)


def forward_gather_s(case: StepCase, stage: PipelineStage, layer: LayerTime) -> float:
    """What of gathering a layer for a forward pass is not hidden beside it; 0 where layers are whole anyway."""
    if case.engine != "fsdp" or case.layout.pp > 1:
        return 0.0
    gather_s = network.gather_s(case.hardware, network.shard_group(case.layout), _gathered_layer_bytes(case, stage))
    return exposed_s(case, gather_s, layer.both.forward_s)


def _gradient_reduction_s(case: StepCase, stage: PipelineStage, layer: LayerTime) -> float:
    """Gradients are reduced beside the last backward pass; parameters are gathered beside the next forward pass."""
    layout, hardware = case.layout, case.hardware
    if layout.data_parallel_size * layout.cp == 1:
        return 0.0
    held = case.trained(stage)
    gradient_bytes = 4 if case.workload.precision == "fp32" else case.software.gradient_bytes
    shards = network.shard_group(layout)
    experts = network.expert_replica_group(layout)
    reduce_s = network.gather_s(hardware, shards, gradient_bytes * held.dense)
    reduce_s += network.gather_s(hardware, experts, gradient_bytes * held.expert)
    gather_bytes = case.workload.compute_bytes if layout.optimizer_shards > 1 else gradient_bytes
    gather_s = network.gather_s(hardware, shards, gather_bytes * held.dense)
    gather_s += network.gather_s(hardware, experts, gather_bytes * held.expert)
    replicas_s = network.all_reduce_s(
        hardware, network.replica_group(layout), gradient_bytes * held.dense / layout.optimizer_shards
    )
    if layout.dp_replicate > 1 and layout.optimizer_shards == 1:
        return _hidden_s(case, 2 * reduce_s + replicas_s, stage.num_layers * layer.both.backward_s)
    hidden_gather_s = _hidden_s(case, gather_s, stage.num_layers * layer.both.forward_s)
    return _hidden_s(case, reduce_s + replicas_s, stage.num_layers * layer.both.backward_s) + hidden_gather_s


def _hidden_s(case: StepCase, communication_s: float, compute_s: float) -> float:
    return exposed_s(case, communication_s, compute_s) if case.software.overlaps_gradients else communication_s


def _fsdp_s(case: StepCase, stage: PipelineStage, layer: LayerTime, head: Pass, recompute_s: float) -> float:
    """Every micro-batch gathers each layer twice (once if kept), and reduces its gradients (or the last one does).

    Under a pipeline, where micro-batches of both passes alternate, layers stay gathered and gradients whole for a step.
    """
    layout, hardware = case.layout, case.hardware
    group = network.shard_group(layout)
    size = case.workload.compute_bytes
    outside = outside_parameters(case.shape, stage, layout.tp)
    outside_reduced = outside if case.workload.adapter is None else 0.0
    reduced = (case.trained(stage).total - outside_reduced) / stage.num_layers
    gather_s = network.gather_s(hardware, group, _gathered_layer_bytes(case, stage))
    reduce_s = network.gather_s(hardware, group, 4 * reduced)
    replicas_s = network.all_reduce_s(hardware, network.replica_group(layout), 4 * reduced / layout.optimizer_shards)
    forward_s = exposed_s(case, gather_s, layer.both.forward_s)
    backward_s = layer.both.backward_s + recompute_s
    again_s = gather_s if layout.reshard_after_forward and layout.pp == 1 else 0.0
    with_gradients_s = exposed_s(case, again_s + reduce_s + replicas_s, backward_s)
    without_s = exposed_s(case, again_s, backward_s)
    gatherings = case.micro_batches if layout.pp == 1 else 1.0
    reductions = 1.0 if gathers_gradients(layout, case.software) or layout.pp > 1 else case.micro_batches
    root_s = network.gather_s(hardware, group, size * outside) + network.gather_s(hardware, group, 4 * outside_reduced)
    root_s = exposed_s(case, root_s, (head.forward_s + head.backward_s))
    layers_s = gatherings * (forward_s + without_s) + reductions * (with_gradients_s - without_s)
    return stage.num_layers * layers_s + reductions * root_s + _offload_s(case)


def _gathered_layer_bytes(case: StepCase, stage: PipelineStage) -> float:
    workload = case.workload
    if workload.adapter:
        return gathered_layer_bytes(case.shape, workload.adapter, workload.compute_bytes)
    outside = outside_parameters(case.shape, stage, case.layout.tp)
    return (
        (1 if workload.in_few_bits and not case.software.casts_at_products else workload.compute_bytes)
        * (case.trained(stage).total - outside)
        / stage.num_layers
    )


def _offload_s(case: StepCase) -> float:
    """Shards come from host memory for every gathering, gradients go there once."""
    if not case.layout.cpu_offload:
        return 0.0
    workload = case.workload
    stored: float = 4 * case.shape.num_parameters
    if workload.adapter:
        stored = frozen_bytes(case.shape, workload.adapter, workload.compute_bytes)
    shard_bytes = stored / case.layout.dp_shard
    return (2 * case.micro_batches + 1) * shard_bytes / (case.hardware.host_gb_per_s * 1e9)
