"""Interface (`EngineCosts`) from which the planner gets a training engine's memory and time costs, and its inputs.

A case is one optimizer step of a model under a layout, or a search of all layouts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from stages.models.shape import ModelShape
from stages.parallel.layout import ENGINES, EngineName, Layout, RunConstraints
from stages.planner.adapted import decoding_bytes, learning_parameters
from stages.planner.compute import LayerTime, LayerWork, PassTimes
from stages.planner.hardware import Hardware
from stages.planner.network import Traffic
from stages.planner.partition import PipelineStage, RankParameters
from stages.planner.towers import frozen_parts
from stages.planner.workload import ColocatedServer, ProgramTraits, Workload


@dataclass(frozen=True)
class StepCase:
    """Model, engine, layout and workload of an optimizer step whose memory is predicted (`TimedCase`: time, too)."""

    shape: ModelShape
    engine: EngineCosts
    layout: Layout
    workload: Workload
    software: ProgramTraits

    @property
    def micro_batches(self) -> float:
        """Number of micro-batches per process rank and step, at least 1; a fraction if the batch does not divide."""
        rows = self.layout.micro_batch_size * self.layout.data_parallel_size
        return max(1.0, self.workload.global_batch_size / rows)

    @property
    def tokens(self) -> float:
        """Number of tokens in one micro-batch on one process rank; context parallelism divides rows among ranks."""
        return self.layout.micro_batch_size * self.workload.sequence_length / self.layout.cp

    @property
    def hidden_bytes(self) -> float:
        """Bytes of the hidden states between two layers of one micro-batch on one process rank."""
        return self.tokens * self.shape.hidden_size * self.workload.compute_bytes

    @property
    def work(self) -> LayerWork:
        """Sizes of one layer's computation for one micro-batch (rows, parallel degrees, …), to predict its seconds."""
        layout, workload, adapter = self.layout, self.workload, self.workload.adapter
        return LayerWork(
            self.shape,
            rows=layout.micro_batch_size,
            sequence_length=workload.sequence_length,
            precision=workload.precision,
            tp=layout.tp,
            cp=layout.cp,
            ep=layout.ep,
            etp=self.engine.expert_split(layout),
            sequence_parallel=layout.sequence_parallel,
            is_frozen=adapter is not None,
            decoded_bytes=decoding_bytes(self.shape, adapter, workload.compute_bytes) if adapter else 0.0,
        )

    def trained(self, stage: PipelineStage) -> RankParameters:
        layout, expert_split = self.layout, self.engine.expert_split(self.layout)
        apart = frozen_parts(self.shape, self.workload)
        if apart.text:  # towers and projector alone learn, which no degree splits
            layout, expert_split = layout.model_copy(update={"tp": 1, "ep": 1}), 1
        adapter = self.workload.adapter
        learning = learning_parameters(self.shape, self.engine.joins_layers, layout, expert_split, adapter, stage)
        if apart.text:
            return RankParameters(learning.total - apart.total, 0.0)
        mixture_layers = stage.num_layers * self.shape.num_mixture_layers / self.shape.num_layers
        # Routers count among the dense parameters, and only mixture layers have one.
        frozen = mixture_layers * self.shape.router_parameters if self.workload.freezes_routers else 0.0
        frozen += apart.total
        return replace(learning, dense=learning.dense - frozen) if frozen else learning


@dataclass(frozen=True)
class TimedCase(StepCase):
    """Optimizer step whose time is predicted: model, workload, layout and hardware."""

    hardware: Hardware

    def exposed_s(self, communication_s: float, compute_s: float) -> float:
        """Return the seconds of communication left after part of it overlaps with `compute_s` seconds of compute."""
        return communication_s - self.hardware.efficiency.overlapped * min(communication_s, compute_s)


@dataclass(frozen=True)
class SearchRequest:
    """Model, training workload and devices for which the planner searches a layout."""

    shape: ModelShape
    workload: Workload
    hardware: Hardware
    num_gpus: int
    engines: tuple[EngineName, ...] = ENGINES
    software: ProgramTraits | None = None
    available_gib: float | None = None
    """Memory available on each device in GiB; None: the hardware's memory."""
    server: ColocatedServer | None = None
    """Sampling server on the same devices, if there is one."""
    no_compiler: str | None = None
    """Why the machine that will train cannot compile layers; None if it can, or is not this one."""

    @property
    def memory_gib(self) -> float:
        return self.available_gib or self.hardware.memory_gib

    @property
    def host_gib(self) -> float:
        """Memory of the host in GiB for each process of a node; infinite if the hardware's description lacks it."""
        return (self.hardware.host_memory_gib or math.inf) / self.constraints.processes_per_node

    @property
    def constraints(self) -> RunConstraints:
        """Limits that a legal layout must meet: nodes, processes per node, tokens per row, rows per step."""
        # As few nodes as can have equally many: 12 GPUs of nodes with 8 are 6 on each of two.
        fewest = -(-self.num_gpus // self.hardware.gpus_per_node)
        nodes = next(number for number in range(fewest, self.num_gpus + 1) if self.num_gpus % number == 0)
        workload = self.workload
        return RunConstraints(nodes, self.num_gpus // nodes, workload.sequence_length, workload.global_batch_size)


Computation = Literal["embedding", "forward", "head", "layer", "tower", "nothing"]
"""Computation at a moment: the embedding forward, what follows it forward, the head backward, a layer or the tower
backward, or none any more."""


@dataclass(frozen=True)
class Moment:
    """Moment of a training step at which memory may peak: what a rank then holds beside weights and optimizer state."""

    computes: Computation
    gradients: float
    """Bytes of gradients that wait for the optimizer."""
    buffers: float = 0.0
    """Bytes of gathered parameters, and of gradients that are not reduced yet or just being reduced."""
    arriving: float = 0.0
    """Bytes of buffers in which gathered parameters arrive, beside the parameters that are copied out of them."""
    idle_layers: int = 0
    """Number of layers without activations, whose forward pass is still to come, or whose backward pass is over."""


class EngineCosts(ABC):
    """Memory and time costs specific to one training engine, and the layouts of it that are worth searching."""

    name: ClassVar[EngineName]
    software: ClassVar[ProgramTraits]
    """Behaviour of this project's training program on the engine without compiled layers (fused kernels, …)."""
    keeps_products: ClassVar[bool]
    """True if selective recomputation keeps products and recomputes the rest; False if only the attention core."""
    joins_layers: ClassVar[bool]
    """True if the engine fuses q, k and v, and gate and up; adapters then cover all fused matrices or none."""
    merges_experts: ClassVar[bool]
    """True if an adapter of experts is merged into their weights before use; False if its output is added to theirs."""
    skips_frozen_start: ClassVar[bool]
    """True if layers before the first trainable one keep no activations; else the embedding's output has a gradient."""
    exchanges_heads: ClassVar[bool] = False
    """True if `cp` exchanges heads for tokens around attention; False if keys and values are passed around."""
    splits_by_plan: ClassVar[bool] = False
    """True if `tp` splits what Transformers' plan names, experts too; False if it splits every matrix but experts."""
    more_with_batch: ClassVar[bool]
    """True if a larger micro-batch never takes less memory, so that a search can stop at the first misfit."""

    def program(self, layout: Layout, hardware: Hardware | None = None) -> ProgramTraits:
        """Return the program's behaviour under a layout; compiling layers fuses their elementwise operations."""
        compiled = {"fused_elementwise": True, "compiled_layers": True, "asks_python": False} if layout.compile else {}
        software = replace(self.software, **compiled) if compiled else self.software
        return hardware.habits(software) if hardware else software

    def expert_split(self, layout: Layout) -> int:
        """Return over how many process ranks the matrices of each expert are split."""
        return layout.tp if self.splits_by_plan else layout.etp

    @abstractmethod
    def optimizer_parameters(self, held: RankParameters, layout: Layout) -> float:
        """Count parameters whose optimizer state a rank keeps. held: the rank's before they are sharded."""

    @abstractmethod
    def model_states(self, case: StepCase, stage: PipelineStage) -> tuple[float, float, float]:
        """Return the bytes of weights, of gradients and of optimizer state on one process rank."""

    def bytes_at_rest(self, case: StepCase, stage: PipelineStage) -> float:
        """Return the bytes that one process rank keeps between steps, as while completions are sampled."""
        return sum(self.model_states(case, stage))

    @abstractmethod
    def moments(self, case: StepCase, stage: PipelineStage) -> tuple[Moment, ...]:
        """Return the moments of a step at which one process rank may hold most memory, in their order."""

    @abstractmethod
    def data_parallel_traffic(self, case: StepCase, stage: PipelineStage) -> tuple[Traffic, ...]:
        """Return what a rank's collectives carry in a step to gather weights and reduce gradients."""

    @abstractmethod
    def data_parallel_s(
        self, case: TimedCase, stage: PipelineStage, layer: LayerTime, head: PassTimes, recompute_s: float
    ) -> float:
        """Return the seconds per optimizer step of data-parallel communication that is not hidden by compute."""

    def weight_copies(self, case: StepCase, num_adapted: float) -> float:
        """Return how many kernels copy a layer's weights before its forward pass. num_adapted: layers with adapters."""
        return 0.0

    @abstractmethod
    def forward_gather_s(self, case: TimedCase, stage: PipelineStage, layer: LayerTime) -> float:
        """Return the seconds, not hidden by compute, of gathering one layer's weights for a forward pass."""

    @abstractmethod
    def degrees(self, request: SearchRequest) -> Iterator[dict[str, Any]]:
        """Yield layouts worth searching (which no other always beats) as dicts of fields, without micro-batch size."""
