"""Megatron's data parallelism and Adam: gradients are summed over data-parallel shares, then clipped."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.utils import get_model_config

from stages.engines.megatron.model import compute_dtype
from stages.engines.megatron.optimizer_shards import real_optimizers
from stages.engines.settings import EngineSettings
from stages.parallel.layout import Layout


def wrap_chunks(chunks: Sequence[GPTModel], layout: Layout) -> list[DistributedDataParallel]:
    """Wrap model chunks for data parallelism, with fp32 gradient buffers that are reduced during the backward pass.

    The processes of `dp_shard` and `cp`, which have the same weights, share Adam's state: gradients are
    reduce-scattered, parameters gathered during the next forward.
    """
    is_sharded = layout.optimizer_shards > 1
    # Context-parallel ranks hold the same weights: gradients are reduced over them, too.
    overlaps = layout.data_parallel_size * layout.cp > 1
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=is_sharded,
        num_distributed_optimizer_instances=layout.dp_replicate if is_sharded else 1,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=is_sharded,
    )
    transformer = get_model_config(chunks[0])
    wrapped = [
        # As in Megatron's own training: only the first chunk's reduction is cut into buckets.
        DistributedDataParallel(transformer, config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    transformer.finalize_model_grads_func = _finalize_gradients
    if overlaps:
        # Megatron's schedules enter it around all micro-batches but the last, so that gradients are reduced once.
        suspend = [chunk.no_sync for chunk in wrapped]
        transformer.no_sync_func = suspend if len(suspend) > 1 else suspend[0]
    return wrapped


class Adam:
    """AdamW over this process's model chunks, with weight decay for the same parameters as in the FSDP engine."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], settings: EngineSettings) -> None:
        self._chunks = chunks
        adam = settings.adam
        self.megatron: MegatronOptimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=adam.learning_rate,
                weight_decay=adam.weight_decay,
                adam_beta1=adam.beta1,
                adam_beta2=adam.beta2,
                adam_eps=adam.epsilon,
                clip_grad=0.0,  # `step` does that, once it is known that all is finite
                bf16=settings.precision != "fp32",
                params_dtype=compute_dtype(settings.precision),
                use_distributed_optimizer=settings.layout.optimizer_shards > 1,
            ),
            list(chunks),
            config_overrides=_exceptions(settings),
            use_gloo_process_groups=False,
        )
        for group in self.megatron.param_groups:  # Megatron leaves that to its scheduler, which nothing here needs
            group["weight_decay"] = adam.weight_decay * group["wd_mult"]
        _fuse(self.megatron)

    def zero_gradients(self) -> None:
        """Set the gradient buffers to zero before a training step."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    @torch.no_grad()
    def grad_norm(self) -> torch.Tensor:
        """Return the Euclidean norm of all gradients, each counted once, and prepare them for `step`. Collective.

        It is a float32 tensor on the device; Megatron's own waits for the number, and for one more of experts.
        """
        self.megatron.prepare_grads()
        total = torch.zeros((), device=next(self._chunks[0].parameters()).device)
        for optimizer in self.megatron.chained_optimizers:
            squared = torch.zeros_like(total)
            if gradients := optimizer.get_main_grads_for_grad_norm():  # a chained optimizer may have none
                squared += torch.stack(torch._foreach_norm(gradients)).square().sum()
            dist.all_reduce(squared, group=optimizer.get_grad_stats_parallel_group())
            total += squared
        return total.sqrt()

    @torch.no_grad()
    def step(self, learning_rate: float, grad_norm: float, max_grad_norm: float | None) -> None:
        """Clip gradients and update parameters by AdamW. Collective. grad_norm: finite result of `grad_norm()`."""
        assert math.isfinite(grad_norm)
        if max_grad_norm is not None:
            for optimizer in self.megatron.chained_optimizers:
                parameters = optimizer.get_parameters()  # a chained optimizer may have none on this process
                if parameters:
                    # Each optimizer of the chain by the norm over all of them.
                    clip_grad_by_total_norm_fp32(parameters, max_grad_norm, grad_norm)
        for group in self.megatron.param_groups:
            group["lr"] = learning_rate * group["lr_mult"]
        # Updates masters. Where gathering overlaps, parameters stay old until the next forward pass or `settle`.
        self.megatron.step_with_ready_grads()

    def settle(self) -> None:
        """Wait until the updated parameters are gathered; otherwise gathering overlaps with the next forward pass."""
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


def _exceptions(settings: EngineSettings) -> dict[Any, Any] | None:
    """Return Megatron's overrides: LoRA+'s learning rate of B, or vectors' weight decay; None: no decay of vectors."""
    if settings.adapter and settings.adapter.loraplus_lr_ratio:  # all that learns are matrices
        return {ParamKey(name="*.lora_B*"): {"lr_mult": settings.adapter.loraplus_lr_ratio}}
    return {} if settings.adam.decay_norms_and_biases else None


def _fuse(megatron: MegatronOptimizer) -> None:
    """Use the fused kernel of torch's AdamW, Megatron's optimizer where Transformer Engine is missing."""
    for optimizer in real_optimizers(megatron):
        if isinstance(optimizer.optimizer, torch.optim.AdamW):
            for group in optimizer.optimizer.param_groups:
                group["fused"] = True


def _finalize_gradients(chunks: list[Any], num_tokens: torch.Tensor | None, **options: Any) -> None:
    """Reduce gradients as Megatron does, but without dividing by the number of tokens: losses are divided already."""
    finalize_model_grads(chunks, None, **options)
