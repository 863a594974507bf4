"""One optimizer step to predict: a model under a layout, its workload, and the program that trains it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stages.models.shape import ModelShape
from stages.parallel.layout import EngineName, Layout
from stages.planner.adapted import learning_parameters
from stages.planner.compute import LayerWork
from stages.planner.partition import PipelineStage, RankParameters
from stages.planner.workload import Software, Workload


@dataclass(frozen=True)
class StepCase:
    """Everything that the memory of an optimizer step depends on, and with hardware (`TimedCase`) its time."""

    shape: ModelShape
    engine: EngineName
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
        learning = learning_parameters(self.shape, self.engine, self.layout, self.workload.adapter, stage)
        mixture_layers = stage.num_layers * self.shape.num_mixture_layers / self.shape.num_layers
        frozen = mixture_layers * self.shape.router_parameters if self.workload.freezes_routers else 0.0
        return replace(learning, dense=learning.dense - frozen)
