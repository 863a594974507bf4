"""Which layers a pipeline stage holds, and how many parameters of them one rank does. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from stages.models.shape import ModelShape
from stages.parallel.layout import Layout


@dataclass(frozen=True)
class PipelineStage:
    """One of `pp` stages."""

    index: int
    num_layers: int
    has_embedding: bool
    has_head: bool
    first_layer: int = 0
    """Of consecutive ones; interleaved stages have some of every part of the model."""


@dataclass(frozen=True)
class RankParameters:
    """Parameters of one rank before data parallelism shards them."""

    dense: float
    """Replicated over data and context parallelism."""
    expert: float
    """Replicated over what expert parallelism leaves of data and context parallelism."""

    @property
    def total(self) -> float:
        """Both kinds."""
        return self.dense + self.expert


@lru_cache(maxsize=4096)
def pipeline_stages(num_layers: int, pp: int, balances_head: bool = False) -> tuple[PipelineStage, ...]:
    """Layers spread evenly; where that is uneven (or `balances_head`), the last and the first stage get fewer."""
    if pp == 1:
        return (PipelineStage(0, num_layers, True, True),)
    most = -(-(num_layers + (2 if balances_head else 0)) // pp)
    lacking = most * pp - num_layers
    counts = [most] * pp
    order = [pp - 1, 0, *range(pp - 2, 0, -1)]
    for place in range(lacking):
        counts[order[place % pp]] -= 1
    return tuple(PipelineStage(i, count, i == 0, i == pp - 1, sum(counts[:i])) for i, count in enumerate(counts))


@lru_cache(maxsize=4096)
def stage_shape(shape: ModelShape, stage: PipelineStage, vpp: int) -> ModelShape:
    """The model as a stage has it: of a mixture's dense layers those that lie there (interleaved ones: the average)."""
    if vpp > 1 or not shape.dense_layers or stage.num_layers == shape.num_layers:
        return shape
    dense = range(sum(0 <= layer - stage.first_layer < stage.num_layers for layer in shape.dense_layers))
    return replace(shape, num_layers=stage.num_layers, dense_layers=frozenset(dense))


@lru_cache(maxsize=65536)
def rank_parameters(shape: ModelShape, stage: PipelineStage, tp: int, ep: int, etp: int) -> RankParameters:
    """Matrices are split over tp (experts over ep × etp); norms and the router are whole everywhere."""
    mixture = shape.num_mixture_layers / shape.num_layers
    norms = 2 * shape.norm_parameters + mixture * shape.router_parameters
    per_layer = shape.attention_parameters / tp + (1 - mixture) * shape.ffn_parameters / tp + norms
    experts = mixture * shape.num_experts * shape.expert_parameters / (ep * etp)
    dense = stage.num_layers * per_layer
    if stage.has_embedding:
        dense += shape.embedding_parameters / tp + shape.position_parameters
    if stage.has_head:
        own_head = not (shape.tied_embeddings and stage.has_embedding)
        dense += own_head * shape.embedding_parameters / tp + shape.norm_parameters
    return RankParameters(dense, stage.num_layers * experts)


def outside_parameters(shape: ModelShape, stage: PipelineStage, tp: int) -> float:
    """Of the embedding and the head, so far as this stage has them, on one rank."""
    return (stage.has_embedding * shape.embedding_parameters + stage.has_head * shape.head_parameters) / tp


def optimizer_parameters(held: RankParameters, layout: Layout, engine: str) -> float:
    """Of the parameters of a rank, how many it keeps the optimizer state of."""
    shards = expert_shards = layout.optimizer_shards
    if engine == "megatron" and shards > 1:
        expert_shards = max(1, shards * layout.tp // (layout.ep * layout.etp))
    return held.dense / shards + held.expert / expert_shards


def expert_replicas(layout: Layout) -> int:
    """Ranks that hold the same expert: their gradients are reduced over these."""
    return max(1, layout.data_parallel_size * layout.cp * layout.tp // (layout.ep * layout.etp))
