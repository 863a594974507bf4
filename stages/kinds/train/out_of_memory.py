"""Error message for a process that ran out of memory: the predicted use, and settings that lower it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stages.core.errors import ResourceError
from stages.kinds.train.config import TrainConfig
from stages.parallel.engines.registry import RULES
from stages.parallel.layout import describe_layout

CPU_ALLOCATOR = "DefaultCPUAllocator"
"""Beginning of the RuntimeError by which torch reports that a CPU has no memory left."""


@contextmanager
def explained_out_of_memory(config: TrainConfig, predicted_gib: float | None) -> Iterator[None]:
    """Turn an allocator's out-of-memory error into a ResourceError. predicted_gib: of the fullest process."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not (isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_ALLOCATOR in str(error)):
            raise
        predicted = f"; predicted {predicted_gib:.1f} GiB a process" if predicted_gib is not None else ""
        reason = str(error).partition("\n")[0] or "the host refused more"  # Python's own MemoryError is mute
        raise ResourceError(
            f"rank {os.environ.get('RANK', '0')} ran out of memory under the layout "
            f"{describe_layout(config.engine, config.layout)}{predicted}: {reason}. "
            f"To need less: {', '.join(_settings(config))}"
        ) from error


def _settings(config: TrainConfig) -> Iterator[str]:
    """Yield settings that would lower memory use, those that slow training least first."""
    layout, rules = config.layout, RULES[config.engine]
    if layout.micro_batch_size > 1:
        yield f"lower layout.micro_batch_size (now {layout.micro_batch_size})"
    if layout.recompute != "full":
        yield f"layout.recompute: full (now {layout.recompute})"
    adds_up_shards = "accumulate" in rules.own_fields and not config.optimizer.bf16_stochastic_round
    if adds_up_shards and layout.accumulate != "sharded" and config.micro_batches_per_step > 1:
        yield f"layout.accumulate: sharded (now {layout.accumulate})"
    degrees = (name for name in rules.factors if name != "dp_replicate")  # replicas hold what one holds
    yield f"raise {' or '.join(f'layout.{name} (now {getattr(layout, name)})' for name in degrees)}"
    if "cpu_offload" in rules.own_fields and not layout.cpu_offload:
        yield "layout.cpu_offload: true"
    yield f"lower data.sequence_length (now {config.data.sequence_length})"
