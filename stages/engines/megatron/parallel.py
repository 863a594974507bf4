"""Creation of Megatron's process groups for a parallel layout, before the model is built.

Tensor parallelism is innermost (its traffic is the heaviest), then context, data and pipeline parallelism; expert
parallelism is folded into data and context parallelism.
"""

import math
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from stages.parallel.layout import Layout
from stages.parallel.processes import USUAL_TIMEOUT


def start_model_parallel(layout: Layout, *, is_mixture: bool, seed: int, timeout: timedelta = USUAL_TIMEOUT) -> None:
    """Create Megatron's process groups for the layout and seed tensor-parallel random numbers. Collective."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp if is_mixture else None,
        num_distributed_optimizer_instances=layout.dp_replicate if layout.optimizer_shards > 1 else 1,
        # The optimizer needs the same choice (`use_gloo_process_groups`). Each of gloo's groups has threads of its own.
        create_gloo_process_groups=False,
        distributed_timeout_minutes=math.ceil(timeout.total_seconds() / 60),  # Megatron takes whole minutes
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def represents_share() -> bool:
    """Return whether this process, which has the loss, adds it for its data-parallel share to sums over all."""
    return (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
        and parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    )


def from_last_stage(values: torch.Tensor) -> torch.Tensor:
    """Broadcast the last pipeline stage's values to all pipeline stages, in place."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(values, src=source, group=parallel_state.get_pipeline_model_parallel_group())
    return values
