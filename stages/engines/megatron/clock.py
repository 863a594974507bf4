"""Time that a pipeline stage spends waiting in a training step, from the timers of Megatron's schedules.

A stage works while it goes forward or backward; else, except in the reduction of gradients at a schedule's end, it
waits for tensors of other stages: the bubble, and transfers that nothing hides.
"""

from __future__ import annotations

import time
from collections import defaultdict

import torch

WHOLE = "forward-backward"
"""Name of Megatron's timer that measures a whole pipeline schedule, forward and backward."""
WORK = ("forward-compute", "backward-compute")
REDUCTION = (
    "all-grads-sync",
    "conditional-embedder-grads-all-reduce",
    "embedding-grads-all-reduce",
    "non-tensor-parallel-grads-all-reduce",
)
"""Names of Megatron's timers around the reduction of gradients."""


class PipelineClock:
    """Timers (`TransformerConfig.timers`) of Megatron's pipeline schedules: a GPU stream's time, or wall time."""

    def __init__(self, device: torch.device) -> None:
        self._timers: defaultdict[str, _Timer] = defaultdict(lambda: _Timer(device))

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        """Return the timer of this name, which Megatron's schedules start and stop; the level is ignored."""
        return self._timers[name]

    def take(self) -> tuple[float, float]:
        """Return the seconds spent in pipeline schedules since the last call, and how many of them were waiting."""
        seconds = {name: timer.seconds() for name, timer in self._timers.items()}
        self._timers.clear()
        whole = seconds.get(WHOLE, 0.0) - sum(seconds.get(name, 0.0) for name in REDUCTION)
        return whole, max(0.0, whole - sum(seconds.get(name, 0.0) for name in WORK))


class _Timer:
    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._starts: list[float | torch.cuda.Event] = []
        self._ends: list[float | torch.cuda.Event] = []

    def start(self, barrier: bool = False) -> None:
        """Start the timer, without the barrier that Megatron may ask for, which would distort the measurement."""
        self._starts.append(self._now())

    def stop(self, barrier: bool = False) -> None:
        self._ends.append(self._now())

    def seconds(self) -> float:
        """Return the seconds between all starts and stops of this timer, after waiting for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return sum(_between(start, end) for start, end in zip(self._starts, self._ends, strict=True))

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event)
    return start.elapsed_time(end) / 1000
