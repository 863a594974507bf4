"""The processes of a training stage: joined at the start, parted at the end whatever happens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

USUAL_TIMEOUT = timedelta(minutes=30)
"""Torch's own, of gloo; that of NCCL is 10 minutes."""
MARGIN = timedelta(minutes=1)


def collective_timeout(hang_timeout_s: float) -> timedelta:
    """How long a collective may wait: longer than the watchdog, which alone says what every process was doing."""
    return max(USUAL_TIMEOUT, timedelta(seconds=hang_timeout_s) + MARGIN)


@contextmanager
def joined_processes(timeout: timedelta = USUAL_TIMEOUT) -> Iterator[torch.device]:
    """Join the process group that torchrun's environment describes, or a group of one; yields this process's device.

    CPU tensors always have a backend (gloo): checkpoints and offloaded gradients need it on GPUs too.
    """
    device = _device()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def gathered(value: float) -> list[float]:
    """`value` of every process, by rank. Collective."""
    values = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    return values.tolist()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
