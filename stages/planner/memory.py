"""Predicted peak device memory of a process rank, for each pipeline stage and by use (weights, gradients, …).

Weights, gradients and optimizer states follow Rajbhandari et al. 2020 (ZeRO, section 3.1). With an adapter the base is
frozen: it has neither gradients nor optimizer state, and is stored as `adapter.base_precision` says.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from stages.models.shape import ModelShape
from stages.parallel.layout import EngineName, Layout
from stages.planner.activations import (
    head_inputs_per_token,
    kept_by_layer,
    merged_experts_workspace,
    weight_workspace,
    workspace_per_token,
)
from stages.planner.adapted import first_learning_layer
from stages.planner.compute import LOGITS_CHUNK
from stages.planner.costs import Moment, StepCase
from stages.planner.engines.registry import COSTS
from stages.planner.hardware import Efficiency
from stages.planner.partition import PipelineStage, pipeline_stages, stage_shape
from stages.planner.towers import MediaBytes, media_bytes
from stages.planner.workload import ColocatedServer, ProgramTraits, Workload

GIB = 2**30


@dataclass(frozen=True)
class StageMemory:
    """Memory of one process rank of a pipeline stage in GiB, by use, at the moment of a step at which it holds most."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """GiB of device memory for activations kept for the backward pass, of all micro-batches in flight."""
    workspace: float
    """GiB of device memory for recomputed activations and activation gradients in the layer that runs backward."""
    logits: float
    """GiB of device memory for the head's inputs, logits and gradient, while it computes."""
    communication: float
    """GiB of device memory for gathered parameters, gradients not reduced yet, and buffers of messages."""
    runtime: float
    """GiB of device memory for driver, libraries, communicators' buffers and memory fragmentation."""

    @property
    def total(self) -> float:
        return sum(vars(self).values())


AWAKE_GIB = 1.5
"""GiB of device memory of a server that samples, beside runtime, weights and KV cache: activations and CUDA graphs.

An assumption, as is `ASLEEP_GIB`: no GPU has measured them for this project."""
ASLEEP_GIB = 0.5
"""GiB of device memory that a sleeping server keeps beside its runtime: CUDA graphs and communicators."""


@dataclass(frozen=True)
class SamplingMemory:
    """Memory of one device in GiB, by use, while a server that shares it with the training samples completions."""

    training_states: float
    """GiB of weights, of the reference model too, and optimizer state, which the training keeps."""
    server_weights: float
    kv_cache: float
    runtime: float
    """GiB of driver and libraries of both programs, and of the server's activations."""

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class MemoryEstimate:
    """Predicted memory in GiB of all pipeline stages, or only of the first and last if one of them uses most."""

    stages: tuple[StageMemory, ...]
    host_gib: float = 0.0
    """GiB of host memory that each process rank uses for offloading."""
    asleep_gib: float = 0.0
    """GiB of device memory that a sampling server on the same devices keeps while it sleeps."""
    sampling: SamplingMemory | None = None
    """Memory while such a server samples; None without one."""

    @cached_property
    def worst(self) -> StageMemory:
        """Memory of the pipeline stage that uses most device memory."""
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def peak_gib(self) -> float:
        """Peak memory in GiB of a device of the fullest pipeline stage, in the phase that takes most."""
        learning_gib = self.worst.total + self.asleep_gib
        return max(learning_gib, self.sampling.total) if self.sampling else learning_gib

    @property
    def fullest(self) -> StageMemory | SamplingMemory:
        """Memory by use in the phase that takes most: a step of the training, or sampling on the same devices."""
        return self.sampling if self.sampling and self.peak_gib == self.sampling.total else self.worst


def memory(
    shape: ModelShape,
    engine: EngineName,
    layout: Layout,
    workload: Workload,
    *,
    software: ProgramTraits | None = None,
    efficiency: Efficiency | None = None,
    every_stage: bool = True,
    learns: bool = True,
    server: ColocatedServer | None = None,
) -> MemoryEstimate:
    """Estimate a step's peak memory of every pipeline stage, or faster only of the first and last ones.

    learns: whether the model learns; else forward passes alone are counted, as of a teacher. server: on the same
    devices.
    """
    costs = COSTS[engine]
    case = StepCase(workload.trained_shape(shape), costs, layout, workload, software or costs.program(layout))
    stages = pipeline_stages(shape.num_layers, layout.pp, case.software.balances_head)
    chosen = stages if every_stage or len(stages) < 3 else _fullest(stages)
    efficiency = efficiency or Efficiency()
    held = _stages(case, chosen, efficiency, learns)
    host_gib = max(host_bytes(case, stage) for stage in chosen) / GIB
    if server is None:
        return MemoryEstimate(held, host_gib)
    sampling = SamplingMemory(
        training_states=max(_bytes_at_rest(case, stage, server) for stage in chosen) / GIB,
        server_weights=server.weight_bytes(shape) / GIB,
        kv_cache=server.least_kv_cache_gib(shape),
        runtime=2 * efficiency.runtime_gib + AWAKE_GIB,
    )
    return MemoryEstimate(held, host_gib, efficiency.runtime_gib + ASLEEP_GIB, sampling)


def _bytes_at_rest(case: StepCase, stage: PipelineStage, server: ColocatedServer) -> float:
    """Return the bytes that the training keeps on a rank while completions are sampled, the reference's included."""
    whole = replace(case, workload=replace(case.workload, adapter=None))
    reference, _, _ = case.engine.model_states(whole, stage) if server.has_reference else (0.0, 0.0, 0.0)
    return case.engine.bytes_at_rest(case, stage) + reference


def _fullest(stages: tuple[PipelineStage, ...]) -> tuple[PipelineStage, ...]:
    """Return the pipeline stages that may use most memory: first ones keep most micro-batches, the last has logits."""
    # The first stage may have fewer layers than the others; then the second may hold more activations.
    if stages[0].num_layers >= stages[1].num_layers:
        return stages[0], stages[-1]
    return stages[0], stages[1], stages[-1]


@dataclass(frozen=True)
class _LayerBytes:
    """Bytes that one layer, and the towers before all layers, hold of a micro-batch on one process rank."""

    kept: float
    workspace: float
    media: MediaBytes


def _layer(case: StepCase, learns: bool) -> _LayerBytes:
    workspace = case.tokens * workspace_per_token(case) + weight_workspace(case.shape, case.workload)
    media = media_bytes(case.shape, case.layout, case.workload, learns=learns)
    return _LayerBytes(kept_by_layer(case), workspace + merged_experts_workspace(case), media)


def _stages(
    case: StepCase, stages: tuple[PipelineStage, ...], efficiency: Efficiency, learns: bool
) -> tuple[StageMemory, ...]:
    """Return the memory of each pipeline stage's rank at the moment of a step at which it holds most."""
    layers: dict[ModelShape, _LayerBytes] = {}  # most stages have layers of the same shape
    held = []
    for stage in stages:
        # An adapter knows layers by their place in the model.
        shape = case.shape if case.workload.adapter else stage_shape(case.shape, stage, case.layout.vpp)
        own = case if shape is case.shape else replace(case, shape=shape)
        if shape not in layers:
            layers[shape] = _layer(own, learns)
        held.append(_stage(own, stage, layers[shape], efficiency, learns))
    return tuple(held)


def _stage(
    case: StepCase, stage: PipelineStage, layer: _LayerBytes, efficiency: Efficiency, learns: bool
) -> StageMemory:
    layout, media = case.layout, layer.media
    weights, _, optimizer = case.engine.model_states(case, stage)
    layers = _layers_in_flight(case, stage) * _share_with_gradients(case, stage)
    logits = _head(case, learns) if stage.has_head else 0.0
    kept_logits = _kept_logits(case) if stage.has_head else 0.0
    # Under a pipeline: a hidden state and a gradient, each received and sent.
    messages = case.hidden_bytes * (4 * (layout.pp > 1) + 2 * (layout.tp > 1))
    degrees = (layout.tp, layout.pp, layout.cp, layout.ep, layout.data_parallel_size)
    held_gib = efficiency.runtime_gib + sum(degree > 1 for degree in degrees) * efficiency.communicator_gib
    by_moment = []
    moments = case.engine.moments(case, stage)
    gradients, arriving = max(one.gradients for one in moments), max(one.arriving for one in moments)
    for moment in moments:
        if not learns and moment.computes not in ("embedding", "forward", "head"):
            continue
        states = (weights, moment.gradients * learns, optimizer * learns)
        # Before the layers of text run, the towers do.
        sees = moment.computes == "tower" or (moment.computes == "forward" and moment.idle_layers == stage.num_layers)
        # By plan, what the head exchanges comes after its logits are gone.
        exchanges = moment.computes != "head" or not case.engine.splits_by_plan
        passing = (
            layer.kept * min(_layers_on_device(case, moment), max(0.0, layers - moment.idle_layers)) * learns
            + media.kept * (moment.computes not in ("embedding", "nothing")),
            layer.workspace * (moment.computes in (("layer",) if learns else ("embedding", "forward")))
            + media.workspace * sees,
            logits if moment.computes == "head" else kept_logits * (moment.computes not in ("embedding", "forward")),
            messages * exchanges + moment.buffers + moment.arriving,
        )
        # States last for the whole run: in flat buffers they leave no gaps.
        fragmented = sum(passing) + (sum(states) if case.software.fragments_states else 0.0)
        # FSDP2 gathers and reduces in streams of their own, whose memory torch's allocator gives to no other.
        idle = gradients - moment.gradients + arriving - moment.arriving
        runtime = held_gib * GIB + efficiency.fragmentation * fragmented + efficiency.streams * idle
        by_moment.append((*states, *passing, runtime))
    return StageMemory(*(part / GIB for part in max(by_moment, key=sum)))


def _share_with_gradients(case: StepCase, stage: PipelineStage) -> float:
    """Return the share of a stage's layers that keep activations; frozen ones before the first trained may not."""
    if case.workload.adapter is None or not case.engine.skips_frozen_start:
        return 1.0
    return 1 - first_learning_layer(case.shape, case.workload.adapter) / stage.num_layers


def _layers_on_device(case: StepCase, moment: Moment) -> float:
    """Return the largest number of layers whose activations are on the device; others' are on the host, if offloaded.

    The layer that computes and the one that is copied; the last layer's stay, and those before it have left by then.
    """
    if case.layout.recompute != "offload":
        return math.inf
    return 1.0 if moment.computes == "head" else 2.0


def _layers_in_flight(case: StepCase, stage: PipelineStage) -> float:
    """Count pairs of layer and micro-batch whose activations wait for a backward pass on one rank of a pipeline stage.

    The schedule is 1F1B, or interleaved (Narayanan et al. 2021).
    """
    layout, micro_batches = case.layout, int(case.micro_batches)
    after = layout.pp - stage.index - 1
    if layout.vpp == 1:
        # 1F1B with pp = 4: the stages hold 4, 3, 2 and 1 micro-batches.
        return stage.num_layers * min(micro_batches, after + 1)
    # Chunks of layers that an interleaved stage runs forward before its first backward pass, and that one's own.
    chunks = 2 * after + (layout.vpp - 1) * layout.pp + 1
    return stage.num_layers / layout.vpp * min(micro_batches * layout.vpp, chunks)


def _head(case: StepCase, learns: bool) -> float:
    """Return the peak bytes of the head: its inputs, logits, and in a backward pass its gradient, where it learns.

    Chunked logits take 8 bytes each, forward alone 6; see `stages.engines.log_probabilities`.
    """
    if case.workload.scores_documents:
        return 0.0
    logits = case.tokens * case.shape.vocab_size / case.layout.tp
    inputs, size = case.tokens * head_inputs_per_token(case), case.workload.compute_bytes
    adapter = case.workload.adapter
    is_trained = learns and (adapter.saves("lm_head") if adapter else case.workload.learns("language_model"))
    gradient = size * case.shape.embedding_parameters / case.layout.tp if is_trained else 0.0
    if case.software.chunked_logits:
        return inputs + (8 if learns else 6) * min(logits, LOGITS_CHUNK) + gradient
    # The head's gradient comes after the fp32 copies of the logits, of which forward passes alone have one. A loss that
    # torch compiles writes the logits' gradient into a tensor of its own, since they are not its own.
    fused = size * (case.layout.compile or case.software.keeps_logits) if learns else 0
    copies = fused if case.software.fused_cross_entropy else 8 if learns else 4
    return inputs + max((size + copies) * logits, size * logits + gradient)


def _kept_logits(case: StepCase) -> float:
    """Return the bytes of logits that the program holds on to during the backward pass."""
    if not case.software.keeps_logits or case.workload.scores_documents:
        return 0.0
    return case.workload.compute_bytes * case.tokens * case.shape.vocab_size / case.layout.tp


def host_bytes(case: StepCase, stage: PipelineStage) -> float:
    """Return a rank's bytes on the host: model states (`cpu_offload`), and activations of all layers but the last."""
    layout = case.layout
    num_bytes = 0.0
    if layout.recompute == "offload":
        layers = _layers_in_flight(case, stage) * _share_with_gradients(case, stage)
        num_bytes += kept_by_layer(case) * max(0.0, layers - 1)
    if layout.cpu_offload:
        # The engine answers 0 for what is offloaded, so it is asked as if nothing were.
        on_device = replace(case, layout=layout.model_copy(update={"cpu_offload": False}))
        num_bytes += sum(case.engine.model_states(on_device, stage))
    return num_bytes
