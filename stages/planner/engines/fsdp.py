"""Memory and time costs of the FSDP2 engine, which shards everything and gathers each layer (Zhao et al. 2023).

Selective recomputation and adapters are those of PyTorch and PEFT.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stages.parallel.layout import Layout
from stages.planner import network
from stages.planner.adapted import frozen_bytes, gathered_layer_bytes, merged_experts
from stages.planner.compute import LayerTime, PassTimes
from stages.planner.costs import EngineCosts, SearchRequest, StepCase, TimedCase
from stages.planner.partition import PipelineStage, RankParameters, outside_parameters, rank_parameters
from stages.planner.workload import ProgramTraits


class FsdpCosts(EngineCosts):
    """Memory and time costs of PyTorch's FSDP2 around Transformers' layers, whose norms are unfused operations."""

    name = "fsdp"
    software = ProgramTraits(fused_elementwise=False, fragments_states=True, casts_at_products=True)
    keeps_products = True
    joins_layers = False
    merges_experts = True
    skips_frozen_start = True
    more_with_batch = False  # the largest has no gradients to add up

    def optimizer_parameters(self, held: RankParameters, layout: Layout) -> float:
        return held.dense / layout.optimizer_shards + held.expert / layout.optimizer_shards

    def model_states(self, case: StepCase, stage: PipelineStage) -> tuple[float, float, float]:
        layout, workload = case.layout, case.workload
        if layout.cpu_offload:
            return 0.0, 0.0, 0.0
        adapter, shards, size = workload.adapter, layout.dp_shard, workload.state_bytes
        if adapter is None:
            held = rank_parameters(case.shape, stage, layout.tp, layout.ep, layout.etp)
            learning = self.optimizer_parameters(case.trained(stage), layout)
            matrices = _muon_matrices(case, stage) / shards
            weights = size.weight * self.optimizer_parameters(held, layout)
            # Muon keeps one fp32 moment of a matrix instead of two.
            return weights, size.weight * learning, size.moments * learning - 4 * matrices
        trained = case.trained(stage).total / shards
        frozen = frozen_bytes(case.shape, adapter, workload.compute_bytes) / shards
        # LoRA factors and their gradients are in fp32, whatever the base is stored in.
        return frozen + 4 * trained, 4 * trained, size.moments * trained

    def buffer_bytes(self, case: StepCase, stage: PipelineStage) -> float:
        """Return the bytes of gathered parameters and of one layer's unsharded gradients on one process rank.

        Gathered at once are embedding, head and a few layers; under a pipeline all, for a step, gradients unsharded.
        """
        layout, size = case.layout, case.workload.compute_bytes
        held = rank_parameters(case.shape, stage, layout.tp, layout.ep, layout.etp).total
        outside = outside_parameters(case.shape, stage, layout.tp)
        keeps_layers = not layout.reshard_after_forward or layout.pp > 1
        # The layer that computes, the next, which FSDP gathers meanwhile, and those that are prefetched besides.
        alive = stage.num_layers if keeps_layers else min(stage.num_layers, 2 + layout.prefetch_layers)
        if case.workload.adapter is not None:
            # Gathered parameters arrive in one buffer and are copied out of it; a single process gathers nothing ahead.
            is_alone = layout.optimizer_shards == 1
            alive = min(alive, 2) if is_alone and not keeps_layers else alive + (not is_alone)
            if is_alone and not keeps_layers and any(merged_experts(case.shape, case.workload.adapter)):
                alive = 1  # freed before the sum of experts and their adapter is made, which is as large
            layer = gathered_layer_bytes(case.shape, case.workload.adapter, size)
            return alive * layer + size * outside
        if layout.optimizer_shards == 1:
            # A single process gathers nothing, but casts its fp32 weights.
            return (size * held) if size < 4 else 0.0
        layer = (held - outside) / stage.num_layers
        gathered = size * (alive * layer + outside)
        keeps_gradients = int(case.micro_batches) > 1 and _reduces_once(case)
        # Shards of gradients replace whole ones, a layer at a time; on the device they count among the states.
        shards = 0.0 if layout.cpu_offload else held / layout.dp_shard
        return gathered + 4 * (held - shards if keeps_gradients else layer) + size * layer

    def data_parallel_s(
        self, case: TimedCase, stage: PipelineStage, layer: LayerTime, head: PassTimes, recompute_s: float
    ) -> float:
        """Return the seconds per step of gathering, gradient reduction and offloading that are not hidden by compute.

        Every micro-batch gathers each layer twice (once if `reshard_after_forward` is off); gradients are reduced after
        each micro-batch or after the last. Under a pipeline layers stay gathered and gradients whole for a step.
        """
        layout, hardware = case.layout, case.hardware
        group = network.shard_group(layout)
        size = case.workload.compute_bytes
        outside = outside_parameters(case.shape, stage, layout.tp)
        outside_reduced = outside if case.workload.adapter is None else 0.0
        reduced = (case.trained(stage).total - outside_reduced) / stage.num_layers
        gather_s = network.gather_s(hardware, group, _gathered_bytes(case, stage))
        reduce_s = network.gather_s(hardware, group, 4 * reduced)
        replicas = network.replica_group(layout)
        replicas_s = network.all_reduce_s(hardware, replicas, 4 * reduced / layout.optimizer_shards)
        forward_s = case.exposed_s(gather_s, layer.both.forward_s)
        backward_s = layer.both.backward_s + recompute_s
        # Gathering a layer again for the backward pass.
        again_s = gather_s if layout.reshard_after_forward and layout.pp == 1 else 0.0
        # All of a layer's communication hides behind the same backward pass, so what each part adds is a difference.
        with_gradients_s = case.exposed_s(again_s + reduce_s + replicas_s, backward_s)
        without_s = case.exposed_s(again_s, backward_s)
        gatherings = case.micro_batches if layout.pp == 1 else 1.0
        reductions = 1.0 if _reduces_once(case) else case.micro_batches
        # Embedding and head are one group of FSDP's, around all layers.
        root_s = network.gather_s(hardware, group, size * outside)
        root_s += network.gather_s(hardware, group, 4 * outside_reduced)
        root_s = case.exposed_s(root_s, (head.forward_s + head.backward_s))
        layers_s = gatherings * (forward_s + without_s) + reductions * (with_gradients_s - without_s)
        return stage.num_layers * layers_s + reductions * root_s + _offload_s(case)

    def forward_gather_s(self, case: TimedCase, stage: PipelineStage, layer: LayerTime) -> float:
        if case.layout.pp > 1:
            return 0.0
        gather_s = network.gather_s(case.hardware, network.shard_group(case.layout), _gathered_bytes(case, stage))
        return case.exposed_s(gather_s, layer.both.forward_s)

    def degrees(self, request: SearchRequest) -> Iterator[dict[str, Any]]:
        # Sharded over all devices, or within a node and replicated over nodes, whose network is slower.
        for dp_shard in sorted({request.num_gpus, min(request.num_gpus, request.hardware.gpus_per_node)}):
            if request.num_gpus % dp_shard:
                continue
            degrees = {"dp_shard": dp_shard, "dp_replicate": request.num_gpus // dp_shard}
            for recompute in ("none", "selective", "full"):
                for reshard in (True, False) if dp_shard > 1 else (True,):
                    yield {**degrees, "recompute": recompute, "reshard_after_forward": reshard}
            yield {**degrees, "recompute": "full", "cpu_offload": True}


def _reduces_once(case: StepCase) -> bool:
    """Return whether gradients stay unsharded between micro-batches, and are reduced once per optimizer step."""
    accumulate = case.layout.accumulate
    keeps_whole = case.software.gathers_gradients if accumulate == "auto" else accumulate == "whole"
    return keeps_whole or case.layout.pp > 1


def _muon_matrices(case: StepCase, stage: PipelineStage) -> float:
    """Count the parameters that Muon optimizes with one moment: all but embeddings, the head and vectors."""
    if case.workload.optimizer != "muon":
        return 0.0
    shape, layout = case.shape, case.layout
    held = rank_parameters(shape, stage, layout.tp, layout.ep, layout.etp).total
    # Two norms a layer, and the last one before the head.
    norms = shape.norm_parameters * (2 * stage.num_layers + stage.has_head)
    positions = shape.position_parameters * stage.has_embedding
    return held - outside_parameters(shape, stage, layout.tp) - norms - positions


def _gathered_bytes(case: TimedCase, stage: PipelineStage) -> float:
    """Return the bytes of one whole layer as FSDP gathers it for a pass, including its adapter, if any."""
    workload, layout = case.workload, case.layout
    if workload.adapter:
        return gathered_layer_bytes(case.shape, workload.adapter, workload.compute_bytes)
    outside = outside_parameters(case.shape, stage, layout.tp)
    return (
        (1 if workload.in_few_bits and not case.software.casts_at_products else workload.compute_bytes)
        * (rank_parameters(case.shape, stage, layout.tp, layout.ep, layout.etp).total - outside)
        / stage.num_layers
    )


def _offload_s(case: TimedCase) -> float:
    """Return the seconds per step of CPU offload's copies: weights for each gathering, gradients once."""
    if not case.layout.cpu_offload:
        return 0.0
    workload = case.workload
    stored: float = 4 * case.shape.num_parameters
    if workload.adapter:
        stored = frozen_bytes(case.shape, workload.adapter, workload.compute_bytes)
    shard_bytes = stored / case.layout.dp_shard
    # Gathered forward and backward in each micro-batch; the 1 is the gradient's way back.
    return (2 * case.micro_batches + 1) * shard_bytes / (case.hardware.host_gb_per_s * 1e9)
