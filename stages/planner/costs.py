"""Questions that the planner asks an engine (`EngineCosts`), and the cases that it asks about.

A case is one optimizer step of a model under a layout, or a search of all layouts. Answers are in `engines/`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from stages.models.shape import ModelShape
from stages.parallel.layout import ENGINES, EngineName, Layout, RunConstraints
from stages.planner.adapted import learning_parameters
from stages.planner.compute import LayerTime, LayerWork, Pass
from stages.planner.hardware import Hardware
from stages.planner.partition import PipelineStage, RankParameters
from stages.planner.workload import Software, Workload


@dataclass(frozen=True)
class StepCase:
    """Everything that the memory of an optimizer step depends on, and with hardware (`TimedCase`) its time."""

    shape: ModelShape
    engine: EngineCosts
    layout: Layout
    workload: Workload
    software: Software

    @property
    def micro_batches(self) -> float:
        """Number of micro-batches of one rank in a step, at least 1; a fraction if the batch does not divide."""
        rows = self.layout.micro_batch_size * self.layout.data_parallel_size
        return max(1.0, self.workload.global_batch_size / rows)

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank; context parallelism splits them."""
        return self.layout.micro_batch_size * self.workload.sequence_length / self.layout.cp

    @property
    def work(self) -> LayerWork:
        """FLOPs and bytes of one layer for one micro-batch, as `compute` takes them."""
        layout, workload = self.layout, self.workload
        return LayerWork(
            self.shape,
            rows=layout.micro_batch_size,
            sequence_length=workload.sequence_length,
            precision=workload.precision,
            tp=layout.tp,
            cp=layout.cp,
            ep=layout.ep,
            etp=layout.etp,
            sequence_parallel=layout.sequence_parallel,
            is_frozen=workload.adapter is not None,
        )

    def trained(self, stage: PipelineStage) -> RankParameters:
        """Count the trainable parameters of one rank of a pipeline stage, before data-parallel sharding."""
        joins_layers = self.engine.joins_layers
        learning = learning_parameters(self.shape, joins_layers, self.layout, self.workload.adapter, stage)
        mixture_layers = stage.num_layers * self.shape.num_mixture_layers / self.shape.num_layers
        frozen = mixture_layers * self.shape.router_parameters if self.workload.freezes_routers else 0.0
        return replace(learning, dense=learning.dense - frozen)


@dataclass(frozen=True)
class TimedCase(StepCase):
    """Optimizer step whose time is predicted: model, workload, layout and hardware."""

    hardware: Hardware

    def exposed_s(self, communication_s: float, compute_s: float) -> float:
        """Return the seconds of communication that remain after hiding it behind this much compute."""
        return communication_s - self.hardware.efficiency.overlapped * min(communication_s, compute_s)


@dataclass(frozen=True)
class SearchRequest:
    """Model, workload and devices that a layout is searched for."""

    shape: ModelShape
    workload: Workload
    hardware: Hardware
    num_gpus: int
    engines: tuple[EngineName, ...] = ENGINES
    software: Software | None = None
    available_gib: float | None = None
    """Available memory of each device; default: the hardware's."""

    @property
    def memory_gib(self) -> float:
        """Available memory of each device in GiB."""
        return self.available_gib or self.hardware.memory_gib

    @property
    def constraints(self) -> RunConstraints:
        """Numbers of nodes, processes and rows that a layout must fit."""
        per_node = min(self.num_gpus, self.hardware.gpus_per_node)
        rows = self.workload.global_batch_size
        return RunConstraints(-(-self.num_gpus // per_node), per_node, self.workload.sequence_length, rows)


class EngineCosts(ABC):
    """Memory and time that an engine takes beyond what every engine does, and the layouts worth searching."""

    name: ClassVar[EngineName]
    software: ClassVar[Software]
    """Habits of this project's training program on the engine, with layers that are not compiled."""
    keeps_products: ClassVar[bool]
    """Selective recomputation keeps results of matrix products, and computes the rest again; else it computes the core
    of attention again, and keeps the rest."""
    joins_layers: ClassVar[bool]
    """Queries, keys and values are one matrix, gate and up another: either has an adapter for all parts, or for none.
    """
    merges_experts: ClassVar[bool]
    """An adapter of experts is added to their weights before use; else its output is added to theirs."""
    skips_frozen_start: ClassVar[bool]
    """Layers before the first one that learns keep no activations; else the frozen embedding asks for gradients."""
    more_with_batch: ClassVar[bool]
    """A larger micro-batch never takes less memory."""

    def program(self, layout: Layout, hardware: Hardware | None = None) -> Software:
        """Return this project's training program under a layout, with its habits on the hardware.

        Compiling layers fuses their elementwise operations.
        """
        software = replace(self.software, fused_elementwise=True) if layout.compile else self.software
        return hardware.habits(software) if hardware else software

    @abstractmethod
    def optimizer_parameters(self, held: RankParameters, layout: Layout) -> float:
        """Count the parameters whose optimizer state a rank keeps.

        held: the rank's parameters before they are sharded.
        """

    @abstractmethod
    def model_states(self, case: StepCase, stage: PipelineStage) -> tuple[float, float, float]:
        """Return the bytes of weights, gradients and optimizer on one rank."""

    @abstractmethod
    def buffer_bytes(self, case: StepCase, stage: PipelineStage) -> float:
        """Return the bytes of one rank's gathered parameters, and of gradients before they are sharded."""

    @abstractmethod
    def data_parallel_s(
        self, case: TimedCase, stage: PipelineStage, layer: LayerTime, head: Pass, recompute_s: float
    ) -> float:
        """Return the seconds of data-parallel communication in a step that compute does not hide."""

    @abstractmethod
    def forward_gather_s(self, case: TimedCase, stage: PipelineStage, layer: LayerTime) -> float:
        """Return the seconds of gathering a layer for a forward pass that compute does not hide."""

    @abstractmethod
    def degrees(self, request: SearchRequest) -> Iterator[dict[str, Any]]:
        """Yield fields of the layouts to search, without the micro-batch; dominated layouts are left out."""
