"""Predicted time of an optimizer step under a layout, by kind of work (compute, communication, pipeline bubble, …).

The slowest stage paces the pipeline, which idles for (pp - 1) / vpp micro-batches (Narayanan et al. 2021, section 2.2).
Tensor parallelism reduces twice in a layer's forward and twice in its backward pass (Shoeybi et al. 2020). Context
parallelism passes keys and values around a ring (Liu et al. 2023). Communication that can overlap with compute is
hidden except for a fixed share, since it takes memory bandwidth and processors from compute.
"""

import math
from dataclasses import dataclass, replace

from stages.models.flops import ModelFlops, model_flops_utilization
from stages.models.shape import ModelShape
from stages.models.tower import Tower
from stages.parallel.layout import EngineName, Layout
from stages.planner import network
from stages.planner.activations import kept_by_layer, recomputed_products_share
from stages.planner.adapted import adapted_flops
from stages.planner.compilation import compilation_per_step_s
from stages.planner.compute import LayerTime, PassTimes, head_time, layer_time, memory_rate
from stages.planner.costs import StepCase, TimedCase
from stages.planner.engines.registry import COSTS
from stages.planner.hardware import Hardware
from stages.planner.kernels import layer_kernels
from stages.planner.network import Traffic
from stages.planner.partition import PipelineStage, pipeline_stages, stage_shape
from stages.planner.split import not_summed_beside, split_values
from stages.planner.workload import ProgramTraits, RowMedia, Workload

ASKED_S = 82e-6
"""Host seconds for each kernel of a layer in which torch asks Python whether to keep an operation's result.

From one H100, on which kernels took 441 ms of a step of 497: 16 eager passes through a layer, and their repetition."""


@dataclass(frozen=True)
class TimeParts:
    """Seconds of an optimizer step by kind of work. Communication counts only as far as compute does not hide it."""

    compute: float
    recompute: float
    offload: float
    """Seconds of copying activations to the host and back; model states' count with data parallelism."""
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    pipeline_messages: float
    bubble: float
    data_parallel: float
    optimizer: float
    tower: float
    """Seconds of the towers of media and their projector, recomputation included."""
    method_passes: float
    """Seconds of additional forward passes in each training step, such as those of a reference model."""

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class TimeEstimate:
    """Predicted time of an optimizer step, with throughput, MFU and bubble fraction that follow from it."""

    parts: TimeParts
    tokens_per_s_per_gpu: float
    mfu: float
    """Model FLOPs utilization: model FLOPs (`stages.models.flops`) per second over the peak in bf16 (or fp32)."""
    bubble_fraction: float
    reference_pass_s: float
    """Seconds of forward passes over one step's rows before training, such as a reference model's; 0 without any."""
    compilation_s: float
    """Seconds of compiling layers once in a training, for each step."""

    @property
    def step_time_s(self) -> float:
        return self.parts.total

    @property
    def mean_step_s(self) -> float:
        """Seconds of a step with its share of compilation, by which layouts are ranked."""
        return self.step_time_s + self.compilation_s


@dataclass(frozen=True)
class _LayerCost:
    """Predicted seconds of one layer for one micro-batch: compute, recomputation, communication by parallelism."""

    layer: LayerTime
    tensor: PassTimes
    context: PassTimes
    expert: PassTimes
    recompute_s: float
    offload_s: float

    @property
    def total_s(self) -> float:
        communication = _sum(self.tensor) + _sum(self.context) + _sum(self.expert)
        return _sum(self.layer.both) + self.recompute_s + self.offload_s + communication


def step_time(
    shape: ModelShape,
    engine: EngineName,
    layout: Layout,
    workload: Workload,
    hardware: Hardware,
    *,
    software: ProgramTraits | None = None,
) -> TimeEstimate:
    """Estimate the time of one optimizer step of `workload` on `layout.world_size` devices."""
    shape = workload.trained_shape(shape)
    costs = COSTS[engine]
    case = TimedCase(shape, costs, layout, workload, software or costs.program(layout, hardware), hardware)
    parts = _parts(case)
    num_devices = layout.world_size
    patches = {tower.part: media.of_row(tower) for tower, media in workload.media_by_tower(shape)}
    flops = training_flops(shape, workload).training([workload.sequence_length], workload.sequence_length, patches)
    peak = hardware.peak_flops_per_s("fp32" if workload.precision == "fp32" else "bf16")
    return TimeEstimate(
        parts=parts,
        tokens_per_s_per_gpu=workload.tokens_per_step / parts.total / num_devices,
        mfu=model_flops_utilization(flops * workload.global_batch_size, parts.total, peak, num_devices),
        bubble_fraction=parts.bubble / parts.total,
        reference_pass_s=_forward_passes_s(case, workload.passes.before_training),
        compilation_s=compilation_per_step_s(workload) if layout.compile else 0.0,
    )


def step_traffic(
    shape: ModelShape, engine: EngineName, layout: Layout, workload: Workload, *, stage_index: int = 0
) -> dict[str, float]:
    """Return the bytes that a rank's collectives carry in a step by kind, except tokens that Megatron sends to experts.

    Experts are assumed to be met equally.
    """
    costs = COSTS[engine]
    case = StepCase(workload.trained_shape(shape), costs, layout, workload, costs.program(layout))
    stage = pipeline_stages(shape.num_layers, layout.pp, case.software.balances_head)[stage_index]
    carried: dict[str, float] = {}
    for one in (*_model_parallel_traffic(case, stage), *costs.data_parallel_traffic(case, stage)):
        if one.group.size > 1 and one.num_bytes:
            carried[one.kind] = carried.get(one.kind, 0.0) + one.num_bytes
    return carried


def _model_parallel_traffic(case: StepCase, stage: PipelineStage) -> list[Traffic]:
    layout, states = case.layout, case.hidden_bytes
    layers = case.micro_batches * stage.num_layers
    tensor = network.tensor_group(layout)
    # After the embedding forward, before the head backward.
    ends = case.micro_batches * (stage.has_embedding + stage.has_head)
    recomputed = case.software.recomputed_share if layout.recompute == "full" else 0.0
    if case.engine.splits_by_plan:
        traffic = _split_traffic(case, layers, ends)
        return [*traffic, *_context_traffic(case, layers), *_expert_traffic(case, layers)]
    reductions = layers * (2 * (1 + recomputed) + 2) + ends
    if layout.sequence_parallel:
        # Gradients of weights need the whole inputs of the layer's two inward products once more.
        again = 0.0 if case.workload.adapter else 2 * layers
        traffic = [
            Traffic("all-gather", tensor, (reductions + again) * states),
            Traffic("reduce-scatter", tensor, reductions * states),
        ]
    else:
        traffic = [Traffic("all-reduce", tensor, reductions * states)]
    traffic += _context_traffic(case, layers)
    neighbours = 2 - (stage.index == 0) - (stage.index == layout.pp - 1)
    sent = case.micro_batches * layout.vpp * neighbours * states / layout.tp
    return [*traffic, Traffic("message", network.pipeline_group(layout), sent)]


def _split_traffic(case: StepCase, layers: float, ends: float) -> list[Traffic]:
    """Return what is summed and gathered over `tp` where matrices are split by Transformers' plan."""
    values, size, again = split_values(case.shape), case.tokens * case.workload.compute_bytes, case.layout.recomputes
    summed = layers * (values.summed_forward + again * values.summed_again + values.summed_backward)
    if case.workload.adapter and not again:  # recomputed layers get inputs that have gradients
        summed -= case.micro_batches * not_summed_beside(case.workload.adapter, case.shape)
    group = network.tensor_group(case.layout)
    if case.layout.sequence_parallel:
        # Inputs of blocks are gathered, and for the gradients of their weights once more; so are gradients of results.
        gathered = values.summed_backward * (1 + again + (case.workload.adapter is None)) + values.summed_forward
        # After the last layer, and gradients before the first.
        outside = case.micro_batches * (1 + (case.workload.adapter is None or again)) * case.hidden_bytes
        return [
            Traffic("reduce-scatter", group, summed * size),
            Traffic("all-gather", group, layers * gathered * size + outside),
            Traffic("all-reduce", group, ends * case.hidden_bytes),
        ]
    return [
        Traffic("all-reduce", group, summed * size + ends * case.hidden_bytes),
        Traffic("all-gather", group, layers * ((1 + again) * values.gathered + values.gathered_backward) * size),
    ]


def _expert_traffic(case: StepCase, layers: float) -> list[Traffic]:
    """Return what processes of `ep` send each other: states of chosen tokens to their experts, and results back.

    Their weights go with them, in the precision of the states.
    """
    shape, layout = case.shape, case.layout
    mixtures = layers * shape.num_mixture_layers / shape.num_layers
    sent = case.tokens * shape.experts_per_token * (2 * shape.hidden_size + 1) * case.workload.compute_bytes
    return [Traffic("all-to-all", network.Group(layout.ep, layout.tp), mixtures * (2 + layout.recomputes) * sent)]


def _context_traffic(case: StepCase, layers: float) -> list[Traffic]:
    """Return what processes of `cp` send each other. layers: passes of micro-batches through a layer."""
    layout, group = case.layout, network.context_group(case.layout)
    if case.engine.exchanges_heads:
        passes = 2 + layout.recomputes
        return [Traffic("all-to-all", group, layers * passes * sum(_exchanged_bytes(case)))]
    keys = layers * layout.cp * _key_bytes(case)
    # Transformer Engine's ring passes keys and values around again in the backward pass, with their gradients.
    again = case.software.recomputed_share if layout.recompute == "full" else layout.recomputes
    return [Traffic("all-gather", group, (2 + again) * keys), Traffic("reduce-scatter", group, keys)]


def _parts(case: TimedCase) -> TimeParts:
    """Return an optimizer step's seconds by kind of work; the slowest pipeline stage counts per micro-batch."""
    layout, micro_batches = case.layout, case.micro_batches
    stages = pipeline_stages(case.shape.num_layers, layout.pp, case.software.balances_head)
    head = _head(case)
    whole = _layer_cost(case)
    by_stage = {stage: _staged(case, stage) for stage in _ends(stages)}
    costs = {stage: whole if staged is case else _layer_cost(staged) for stage, staged in by_stage.items()}
    # Seconds of one micro-batch in each stage; only one stage has the head.
    stage_s = {stage: stage.num_layers * cost.total_s + stage.has_head * _sum(head) for stage, cost in costs.items()}
    slowest = max(stage_s, key=lambda stage: stage_s[stage])
    staged, cost = by_stage[slowest], costs[slowest]
    # The pipeline fills and drains through every stage, so the bubble goes by the mean stage, not by the slowest.
    mean_s = (case.shape.num_layers * whole.total_s + _sum(head)) / layout.pp
    compute_s = slowest.num_layers * _sum(cost.layer.both) + slowest.has_head * _sum(head)
    bubble_s = (layout.pp - 1) / layout.vpp * mean_s
    per_layer = micro_batches * slowest.num_layers
    return TimeParts(
        compute=micro_batches * compute_s,
        recompute=per_layer * cost.recompute_s,
        offload=per_layer * cost.offload_s,
        tensor_parallel=per_layer * _sum(cost.tensor),
        context_parallel=per_layer * _sum(cost.context),
        expert_parallel=per_layer * _sum(cost.expert),
        pipeline_messages=_pipeline_messages_s(case),
        bubble=bubble_s,
        data_parallel=case.engine.data_parallel_s(staged, slowest, cost.layer, head, cost.recompute_s),
        optimizer=_optimizer_s(staged, slowest),
        tower=micro_batches * _sum(_tower(case)),
        method_passes=_forward_passes_s(case, case.workload.passes.each_step),
    )


def _staged(case: TimedCase, stage: PipelineStage) -> TimedCase:
    """Return the step restricted to a stage's layers, or whole with an adapter, which selects layers by index."""
    shape = case.shape if case.workload.adapter else stage_shape(case.shape, stage, case.layout.vpp)
    return case if shape is case.shape else replace(case, shape=shape)


def _layer_cost(case: TimedCase) -> _LayerCost:
    """Return the seconds of one layer per micro-batch by kind of work, averaged over the model's layers."""
    layer = layer_time(case.work, case.software, case.hardware, layer_kernels(case))
    tensor, context, expert = _tensor_parallel(case), _context_parallel(case, layer), _expert_parallel(case, layer)
    recompute_s = _recompute_s(case, layer, tensor, context, expert) if case.layout.recomputes else 0.0
    return _LayerCost(layer, tensor, context, expert, recompute_s, _offload_s(case, layer))


def _forward_passes_s(case: TimedCase, number: float) -> float:
    """Return the seconds of forward passes without gradients over a step's rows, in pipelined micro-batches."""
    if not number:
        return 0.0
    layout, cost = case.layout, _layer_cost(case)
    layer_s = sum(one.forward_s for one in (cost.layer.both, cost.tensor, cost.context, cost.expert))
    layer_s += case.engine.forward_gather_s(case, pipeline_stages(case.shape.num_layers, layout.pp)[0], cost.layer)
    model_s = case.shape.num_layers * layer_s + _head(case).forward_s
    model_s += _tower(case).forward_s
    # A stage takes model_s / pp; the last micro-batch leaves the pipeline pp - 1 such times after it entered.
    return number * (case.micro_batches + layout.pp - 1) * model_s / layout.pp


def _tower(case: TimedCase) -> PassTimes:
    """Return the seconds of a micro-batch's media on one process rank; recomputation counts as backward.

    Products run at the full matmul rate. What a layer keeps for its backward pass is written and read once on the way,
    and the host launches as many kernels as for a layer of text: two assumptions.
    """
    by_tower = (_tower_pass(case, tower, media) for tower, media in case.workload.media_by_tower(case.shape))
    return sum(by_tower, PassTimes(0.0, 0.0))


def _tower_pass(case: TimedCase, tower: Tower, media: RowMedia) -> PassTimes:
    workload, hardware = case.workload, case.hardware
    patches = media.of_row(tower) * case.layout.micro_batch_size
    learns = workload.learns(tower.part)
    flops = tower.flops(tower_learns=learns, projector_learns=workload.learns("projector"))
    rate = hardware.sustained_flops_per_s("fp32" if workload.precision == "fp32" else "bf16")
    rate *= hardware.efficiency.matmul
    products = PassTimes(flops.forward(patches) / rate, (flops.training(patches) - flops.forward(patches)) / rate)
    moved_s = 2 * sum(patches) * tower.kept(workload.compute_bytes).layers / memory_rate(hardware)
    host_s = tower.num_layers * layer_kernels(case) * hardware.efficiency.launch_s
    forward_s = products.forward_s + moved_s
    backward_s = products.backward_s + 2 * moved_s * learns
    if learns and case.layout.recomputes:
        backward_s += forward_s if case.layout.recompute == "full" else moved_s
    if hardware.host_is_device:
        return PassTimes(forward_s + host_s, backward_s + 2 * host_s * learns)
    return PassTimes(math.hypot(forward_s, host_s), math.hypot(backward_s, 2 * host_s * learns))


def _head(case: TimedCase) -> PassTimes:
    if case.workload.scores_documents:
        return PassTimes(0.0, 0.0)
    once = head_time(case.work, case.software, case.hardware)
    return once + once if case.workload.predicts_ahead else once


def training_flops(shape: ModelShape, workload: Workload) -> ModelFlops:
    """Return the sizes that decide the FLOPs of training a model, adapters and media included.

    The head of a reward model is left out.
    """
    flops = adapted_flops(shape, workload.adapter) if workload.adapter else shape.flops()
    if not workload.adapter and not workload.learns("language_model"):
        flops = replace(flops, frozen_layer_parameters=flops.layer_parameters, is_head_frozen=True)
    by_tower = (
        tower.flops(tower_learns=workload.learns(tower.part), projector_learns=workload.learns("projector"))
        for tower, _ in workload.media_by_tower(shape)
    )
    flops = replace(flops, towers=tuple(by_tower))
    if workload.scores_documents:
        return replace(flops, head_parameters=0)
    return replace(flops, head_parameters=2 * flops.head_parameters) if workload.predicts_ahead else flops


def _sum(both: PassTimes) -> float:
    return both.forward_s + both.backward_s


def _ends(stages: tuple[PipelineStage, ...]) -> tuple[PipelineStage, ...]:
    """Return the first, one inner and the last pipeline stage, whose costs represent those of all stages."""
    return stages if len(stages) < 3 else (stages[0], stages[1], stages[-1])


def _recompute_s(case: TimedCase, layer: LayerTime, tensor: PassTimes, context: PassTimes, expert: PassTimes) -> float:
    """Return the seconds of recomputing a layer, with the exchanges that are repeated for it."""
    # FSDP2's selective recomputation keeps results of products and attention, but not of exchanges.
    summed_again_s = _exchanged_again_by_plan_s(case) if case.engine.splits_by_plan else tensor.forward_s
    exchanged_again_s = summed_again_s + context.forward_s + expert.forward_s
    if case.layout.recompute == "full":
        return case.software.recomputed_share * (layer.both.forward_s + exchanged_again_s)
    # Selective recomputation of an engine that keeps all but the attention core, which keys and values travel within.
    if not case.engine.keeps_products:
        return layer.attention_core.forward_s + context.forward_s
    products_s = recomputed_products_share(case.shape, case.software) * layer.products.forward_s
    again_s = layer.elementwise.forward_s + products_s
    if case.software.asks_python:
        # Python is asked in the forward pass, and when that is repeated; as with launches, kernels hide most of it.
        busy_s, asked_s = _sum(layer.both) + again_s, 2 * layer_kernels(case) * ASKED_S
        again_s = math.hypot(busy_s, asked_s) - _sum(layer.both)
    return again_s + exchanged_again_s


def _offload_s(case: TimedCase, layer: LayerTime) -> float:
    """Return the seconds of copying a layer's activations to the host and back that compute does not hide.

    They are copied while the next layer computes. Copies take no processors from it, so that all of that time hides
    them.
    """
    if case.layout.recompute != "offload":
        return 0.0
    copy_s = kept_by_layer(case) / (case.hardware.host_gb_per_s * 1e9)
    return sum(max(0.0, copy_s - compute_s) for compute_s in (layer.both.forward_s, layer.both.backward_s))


def _tensor_parallel(case: TimedCase) -> PassTimes:
    """Return a layer's seconds per pass in tensor-parallel all-reduces, as far as they are not hidden by compute.

    Sequence parallelism replaces them by all-gathers and reduce-scatters of the same volume.
    """
    if case.layout.tp == 1:
        return PassTimes(0.0, 0.0)
    if case.engine.splits_by_plan:
        return _exchanged_by_plan(case)
    # Hidden states are reduced twice in a pass: after attention and after the feed-forward block.
    seconds = 2 * network.all_reduce_s(case.hardware, network.tensor_group(case.layout), case.hidden_bytes)
    exposed = 1 - case.hardware.efficiency.overlapped if case.software.overlaps_layers else 1.0
    return PassTimes(seconds * exposed, seconds * exposed)


def _exchanged_by_plan(case: TimedCase) -> PassTimes:
    """Return a layer's seconds per pass of sums and gatherings by Transformers' plan, for which compute waits."""
    values = split_values(case.shape)
    # Gatherings and scatterings, of which a sum has one each. An adapter's base has gradients of its inputs, too.
    into_blocks, out_of_blocks = values.summed_backward, values.summed_forward
    forward = [out_of_blocks, out_of_blocks, values.gathered]
    backward = [into_blocks, into_blocks, values.gathered_backward]
    if case.layout.sequence_parallel:
        forward = [into_blocks, out_of_blocks]
        # Inputs are gathered again for the gradients of weights.
        backward = [out_of_blocks, into_blocks, into_blocks * (case.workload.adapter is None)]
    return PassTimes(_exchange_s(case, forward), _exchange_s(case, backward))


def _exchanged_again_by_plan_s(case: TimedCase) -> float:
    """Return a layer's seconds of sums and gatherings by plan that a recomputed forward pass repeats."""
    if case.layout.tp == 1:
        return 0.0
    values = split_values(case.shape)
    first = values.summed_backward if case.layout.sequence_parallel else values.summed_again
    return _exchange_s(case, [first, values.summed_again, values.gathered])


def _exchange_s(case: TimedCase, values: list[float]) -> float:
    """Return the seconds of exchanges over `tp` of so many values per token."""
    size, group = case.tokens * case.workload.compute_bytes, network.tensor_group(case.layout)
    return sum(network.gather_s(case.hardware, group, one * size) for one in values)


def _context_parallel(case: TimedCase, layer: LayerTime) -> PassTimes:
    """Return a layer's exposed seconds of context-parallel rings: keys and values forward, gradients backward.

    Heads that are exchanged for tokens instead are waited for.
    """
    cp = case.layout.cp
    if cp == 1:
        return PassTimes(0.0, 0.0)
    if case.engine.exchanges_heads:
        group = network.context_group(case.layout)
        exchange_s = sum(network.gather_s(case.hardware, group, one) for one in _exchanged_bytes(case))
        return PassTimes(exchange_s, exchange_s)
    message = _key_bytes(case)
    reach = case.layout.tp * cp
    # The ring's longest hop sets its pace: from the last rank back to the first, (cp - 1) × tp ranks away.
    seconds = (cp - 1) * network.neighbour_s(case.hardware, reach - case.layout.tp, message)
    core = layer.attention_core
    return PassTimes(
        # All but one of the cp blocks are computed while the next one is on its way.
        case.exposed_s(seconds, core.forward_s * (cp - 1) / cp),
        # Backward the keys and values go around again, with their gradients.
        case.exposed_s(2 * seconds, core.backward_s * (cp - 1) / cp),
    )


def _key_bytes(case: StepCase) -> float:
    """Return the bytes of a layer's keys and values of one micro-batch on one process rank."""
    return 2 * case.tokens * case.shape.kv_width / case.layout.tp * case.workload.compute_bytes


def _exchanged_bytes(case: StepCase) -> tuple[float, float, float, float]:
    """Return the bytes of queries, keys, values and results of a layer, whose heads a rank exchanges for tokens."""
    shape, layout = case.shape, case.layout
    size = case.tokens * case.workload.compute_bytes / layout.tp
    heads = shape.num_kv_heads / layout.tp
    # Each head of keys is copied until the heads divide.
    copies = layout.cp / math.gcd(layout.cp, round(heads)) if heads == round(heads) else 1
    return (
        size * shape.query_width,
        size * copies * shape.kv_width,
        size * copies * shape.kv_width,
        size * shape.query_width,
    )


def _expert_parallel(case: TimedCase, layer: LayerTime) -> PassTimes:
    """Return a layer's seconds of sending tokens to their experts and back that are not hidden by compute."""
    if case.layout.ep == 1:
        return PassTimes(0.0, 0.0)
    shape = case.shape
    token_bytes = shape.hidden_size * case.workload.compute_bytes
    # Each tensor-parallel rank dispatches its own share of the tokens; by plan, each has a part of every expert.
    num_tokens = case.work.tokens / (1 if case.engine.splits_by_plan else case.layout.tp)
    layout = case.layout
    group = network.Group(layout.ep, layout.tp) if case.engine.splits_by_plan else network.expert_group(layout)
    # Twice: to the experts and back.
    seconds = 2 * network.dispatch_s(case.hardware, group, num_tokens * token_bytes, shape.experts_per_token)
    mixture = shape.num_mixture_layers / shape.num_layers
    if not case.software.overlaps_experts:
        return PassTimes(mixture * seconds, mixture * seconds)
    forward_s = case.exposed_s(seconds, layer.products.forward_s)
    return PassTimes(mixture * forward_s, mixture * case.exposed_s(seconds, layer.products.backward_s))


def _pipeline_messages_s(case: TimedCase) -> float:
    """Return the seconds per step of messages between pipeline stages that are not hidden by compute.

    Every micro-batch (and chunk) sends a hidden state forward and its gradient back; interleaving hides a part.
    """
    layout = case.layout
    if layout.pp == 1:
        return 0.0
    # Pipeline ranks are numbered slowest.
    stride = network.pipeline_group(layout).stride
    seconds = 2 * network.neighbour_s(case.hardware, stride, case.hidden_bytes / layout.tp)
    hidden = 1 - case.hardware.efficiency.overlapped if layout.vpp > 1 else 1.0
    return (case.micro_batches * layout.vpp + layout.pp - 1) * seconds * hidden


def _optimizer_s(case: TimedCase, stage: PipelineStage) -> float:
    """Return the seconds of Adam's update, from the memory traffic of weights, moments and gradients."""
    layout = case.layout
    parameters = case.engine.optimizer_parameters(case.trained(stage), layout)
    # Bytes moved for a parameter: master weight and two moments in fp32 read and written, and gradient and weight.
    bytes_each = 24 + 2 * 4 + case.workload.compute_bytes
    rate = case.hardware.host_gb_per_s * 1e9 if layout.cpu_offload else memory_rate(case.hardware)
    return parameters * bytes_each / rate
