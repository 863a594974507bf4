"""Memory and time costs of the Megatron-core engine, whose data-parallel ranks each hold whole weights and gradients.

The distributed optimizer reduces gradients once a step, and gathers updated weights (Rajbhandari et al. 2020).
"""

from collections.abc import Iterator
from typing import Any

from stages.models.shape import ModelShape
from stages.parallel.layout import Layout
from stages.planner import network
from stages.planner.adapted import joined_bytes
from stages.planner.compute import LayerTime, PassTimes
from stages.planner.costs import EngineCosts, Moment, SearchRequest, StepCase, TimedCase
from stages.planner.network import Traffic
from stages.planner.partition import PipelineStage, RankParameters, rank_parameters
from stages.planner.workload import ProgramTraits

LEAST_TOKENS_OF_A_CONTEXT_RANK = 1024
INTERLEAVINGS = (1, 2, 3, 4, 5, 6, 8)


class MegatronCosts(EngineCosts):
    """Memory and time costs of Megatron-core's own layers and its distributed optimizer."""

    name = "megatron"
    software = ProgramTraits(gathers_gradients=False)
    keeps_products = False
    joins_layers = True
    merges_experts = False
    skips_frozen_start = False
    more_with_batch = True

    def optimizer_parameters(self, held: RankParameters, layout: Layout) -> float:
        shards = expert_shards = layout.optimizer_shards
        if shards > 1:
            # Fewer ranks hold the same expert than the same dense weight, so fewer share its optimizer state.
            expert_shards = max(1, shards * layout.tp // (layout.ep * layout.etp))
        return held.dense / shards + held.expert / expert_shards

    def model_states(self, case: StepCase, stage: PipelineStage) -> tuple[float, float, float]:
        layout, workload = case.layout, case.workload
        held = rank_parameters(case.shape, stage, layout.tp, layout.ep, layout.etp)
        trained = case.trained(stage)
        sharded = self.optimizer_parameters(trained, layout)
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

    def moments(self, case: StepCase, stage: PipelineStage) -> tuple[Moment, ...]:
        _, gradients, _ = self.model_states(case, stage)  # in buffers that last for the whole run
        return Moment("forward", gradients), Moment("head", gradients), Moment("layer", gradients)

    def data_parallel_traffic(self, case: StepCase, stage: PipelineStage) -> tuple[Traffic, ...]:
        layout, held = case.layout, case.trained(stage)
        size, reduced = case.workload.compute_bytes, _reduced_bytes(case)
        shards, experts = network.shard_group(layout), network.expert_replica_group(layout)
        replicas = network.replica_group(layout)
        if layout.optimizer_shards == 1:
            return (Traffic("all-reduce", replicas, reduced * held.total),)
        return (
            Traffic("all-gather", shards, size * held.dense),
            Traffic("all-gather", experts, size * held.expert),
            Traffic("reduce-scatter", shards, reduced * held.dense),
            Traffic("reduce-scatter", experts, reduced * held.expert),
            Traffic("all-reduce", replicas, reduced * held.dense / layout.optimizer_shards),
        )

    def data_parallel_s(
        self, case: TimedCase, stage: PipelineStage, layer: LayerTime, head: PassTimes, recompute_s: float
    ) -> float:
        """Return the seconds per step of reducing gradients and gathering weights that are not hidden by compute.

        The former is in the last backward pass, the latter in the next forward pass.
        """
        layout, hardware = case.layout, case.hardware
        if layout.data_parallel_size * layout.cp == 1:
            return 0.0
        held = case.trained(stage)
        gradient_bytes = _reduced_bytes(case)
        shards = network.shard_group(layout)
        experts = network.expert_replica_group(layout)
        reduce_s = network.gather_s(hardware, shards, gradient_bytes * held.dense)
        reduce_s += network.gather_s(hardware, experts, gradient_bytes * held.expert)
        # Updated weights with the distributed optimizer; without it, the second half of the gradients' all-reduce.
        gather_bytes = case.workload.compute_bytes if layout.optimizer_shards > 1 else gradient_bytes
        gather_s = network.gather_s(hardware, shards, gather_bytes * held.dense)
        gather_s += network.gather_s(hardware, experts, gather_bytes * held.expert)
        replicas_s = network.all_reduce_s(
            hardware, network.replica_group(layout), gradient_bytes * held.dense / layout.optimizer_shards
        )
        if layout.dp_replicate > 1 and layout.optimizer_shards == 1:
            # Unsharded: experts are all-reduced too, which takes twice as long as a reduce-scatter.
            return _exposed_s(case, 2 * reduce_s + replicas_s, stage.num_layers * layer.both.backward_s)
        exposed_gather_s = _exposed_s(case, gather_s, stage.num_layers * layer.both.forward_s)
        return _exposed_s(case, reduce_s + replicas_s, stage.num_layers * layer.both.backward_s) + exposed_gather_s

    def forward_gather_s(self, case: TimedCase, stage: PipelineStage, layer: LayerTime) -> float:
        return 0.0

    def degrees(self, request: SearchRequest) -> Iterator[dict[str, Any]]:
        """Yield Megatron layouts worth searching, without micro-batch size.

        Left out are tensor parallelism across nodes, and tp > 1 without sequence parallelism.
        """
        for tp in _divisors(min(request.num_gpus, request.hardware.gpus_per_node)):
            for pp in _divisors(request.num_gpus // tp, request.shape.num_layers):
                for cp in _context_degrees(request, request.num_gpus // (tp * pp)):
                    shares = request.num_gpus // (tp * pp * cp)
                    for ep in _expert_degrees(request.shape, shares * tp * cp):
                        degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "sequence_parallel": tp > 1}
                        yield from self._variants(request, degrees, shares)

    def _variants(self, request: SearchRequest, degrees: dict[str, Any], shares: int) -> Iterator[dict[str, Any]]:
        per_stage = request.shape.num_layers // degrees["pp"]
        even = request.shape.num_layers % degrees["pp"] == 0
        # Interleaving needs a pipeline, and equal chunks.
        chunks = [vpp for vpp in INTERLEAVINGS if vpp == 1 or (degrees["pp"] > 1 and even and per_stage % vpp == 0)]
        flash = (request.software or request.hardware.habits(self.software)).flash_attention
        for vpp in chunks:
            # With the distributed optimizer, or with every rank keeping the whole optimizer state.
            for dp_shard in {shares, 1}:
                # Selective recomputation drops the scores, which flash attention never keeps.
                for recompute in ("none", "full") if flash else ("none", "selective", "full"):
                    variant = {"vpp": vpp, "dp_shard": dp_shard, "dp_replicate": shares // dp_shard}
                    yield {**degrees, **variant, "recompute": recompute}


def _reduced_bytes(case: StepCase) -> int:
    """Return the bytes of a gradient as it is reduced."""
    return 4 if case.workload.precision == "fp32" else case.software.gradient_bytes


def _exposed_s(case: TimedCase, communication_s: float, compute_s: float) -> float:
    """Return the seconds of data-parallel communication that are not hidden by compute; without overlap all of them."""
    return case.exposed_s(communication_s, compute_s) if case.software.overlaps_gradients else communication_s


def _context_degrees(request: SearchRequest, num_ranks: int) -> list[int]:
    # The causal mask gives later tokens more work: each rank takes a chunk from either end of the row, hence the 2.
    most = max(1, request.workload.sequence_length // LEAST_TOKENS_OF_A_CONTEXT_RANK // 2)
    return [2**power for power in range(most.bit_length()) if num_ranks % 2**power == 0]


def _expert_degrees(shape: ModelShape, num_ranks: int) -> list[int]:
    if not shape.num_experts:
        return [1]
    return [ep for ep in _divisors(shape.num_experts) if num_ranks % ep == 0]


def _divisors(number: int, most: int | None = None) -> list[int]:
    return [divisor for divisor in range(1, min(number, most or number) + 1) if number % divisor == 0]
