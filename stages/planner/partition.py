"""Distribution of a model's layers over pipeline stages, and the number of parameters on each process rank."""

from dataclasses import dataclass, replace
from functools import lru_cache

from stages.models.shape import ModelShape
from stages.parallel.layout import Layout


@dataclass(frozen=True)
class PipelineStage:
    """Pipeline stage: its index, its layers, and whether it holds the embedding and the output head."""

    index: int
    num_layers: int
    has_embedding: bool
    has_head: bool
    first_layer: int = 0
    """Index of the first of the stage's consecutive layers; does not apply to interleaved stages."""


@dataclass(frozen=True)
class RankParameters:
    """Number of parameters on one process rank before data-parallel sharding, separately for experts."""

    dense: float
    """Number of parameters outside experts, which are replicated over data and context parallelism."""
    expert: float
    """Number of parameters of experts, replicated over the ranks that hold the same expert."""

    @property
    def total(self) -> float:
        return self.dense + self.expert


@lru_cache(maxsize=4096)
def pipeline_stages(num_layers: int, pp: int, balances_head: bool = False) -> tuple[PipelineStage, ...]:
    """Return a model's pipeline stages, evenly spread, else (or with `balances_head`) fewer in the last, then first."""
    if pp == 1:
        return (PipelineStage(0, num_layers, True, True),)
    # 30 layers over 4 stages -> most 8, lacking 2 -> [7, 8, 8, 7]. Balanced, embedding and head count as a layer
    # each.
    most = -(-(num_layers + (2 if balances_head else 0)) // pp)
    lacking = most * pp - num_layers
    counts = [most] * pp
    order = [pp - 1, 0, *range(pp - 2, 0, -1)]
    for place in range(lacking):
        counts[order[place % pp]] -= 1
    return tuple(PipelineStage(i, count, i == 0, i == pp - 1, sum(counts[:i])) for i, count in enumerate(counts))


@lru_cache(maxsize=4096)
def stage_shape(shape: ModelShape, stage: PipelineStage, vpp: int) -> ModelShape:
    """Return the model shape of one pipeline stage: its layers, and how many are dense.

    An interleaved stage keeps the whole model's shape, as the average.
    """
    if vpp > 1 or not shape.dense_layers or stage.num_layers == shape.num_layers:
        return shape
    # Renumbered from 0: only the number of dense layers matters below.
    dense = range(sum(0 <= layer - stage.first_layer < stage.num_layers for layer in shape.dense_layers))
    return replace(shape, num_layers=stage.num_layers, dense_layers=frozenset(dense))


@lru_cache(maxsize=65536)
def rank_parameters(shape: ModelShape, stage: PipelineStage, tp: int, ep: int, etp: int) -> RankParameters:
    """Count the parameters on one process rank of a pipeline stage, before data-parallel sharding.

    `tp` divides matrices, `ep` × `etp` divides experts; norms and routers stay whole. A walked model has one
    stage, and what its plan of tensor parallelism leaves out stays whole, too.
    """
    if shape.kinds:
        split = shape.embedding_parameters + shape.head_parameters
        split += sum(len(kind.layers) * kind.num_split_parameters for kind in shape.kinds)
        dense = shape.num_parameters - shape.routed_parameters - split * (1 - 1 / tp)
        return RankParameters(dense, shape.routed_parameters / (ep * etp))
    mixture = shape.num_mixture_layers / shape.num_layers
    norms = 2 * shape.norm_parameters + mixture * shape.router_parameters
    per_layer = shape.attention_parameters / tp + (1 - mixture) * shape.ffn_parameters / tp + norms
    experts = mixture * shape.num_experts * shape.expert_parameters / (ep * etp)
    dense = stage.num_layers * per_layer
    if stage.has_embedding:
        dense += shape.embedding_parameters / tp + shape.position_parameters
    if stage.has_head:
        # A tied head on another stage than the embedding is a copy of its own.
        own_head = not (shape.tied_embeddings and stage.has_embedding)
        dense += own_head * shape.embedding_parameters / tp + shape.norm_parameters
    return RankParameters(dense, stage.num_layers * experts)


def outside_parameters(shape: ModelShape, stage: PipelineStage, tp: int) -> float:
    """Count the parameters outside layers (embedding, head, towers) on one process rank, if its stage has them."""
    split = stage.has_embedding * shape.embedding_parameters + stage.has_head * shape.head_parameters
    return split / tp + stage.has_head * shape.other_parameters


def expert_replicas(layout: Layout) -> int:
    """Return the number of process ranks that hold the same expert and reduce its gradients."""
    return max(1, layout.data_parallel_size * layout.cp * layout.tp // (layout.ep * layout.etp))
