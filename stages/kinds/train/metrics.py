"""Measurements of a training step: throughput, MFU, waiting for data, memory, communication."""

import resource
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import profile

from stages.data.batch import Batch
from stages.engines.engine import Engine
from stages.models.flops import ModelFlops, Patches, model_flops_utilization
from stages.models.media import TOWERS
from stages.parallel.accelerator import forget_peak, peak_bytes
from stages.parallel.device_types import DEVICE_TYPES
from stages.parallel.devices import Peak
from stages.parallel.host_memory import give_back_freed_memory
from stages.parallel.processes import gathered

GIB = 2**30
COLLECTIVES = tuple(sorted({f"{one.collectives}:" for one in DEVICE_TYPES}))
MOST_PROCESSES_LISTED = 16
"""Largest number of training processes whose memory is logged at every step; of more, only at the end of the run."""
FORGET_PEAK = "5"
"""Number that resets a process's peak memory when written to Linux's `/proc/self/clear_refs`."""


@dataclass(frozen=True)
class Share:
    """Share of a global batch that one process computes, with its tokens and FLOPs."""

    micro_batches: Sequence[Batch]
    num_tokens: int
    """Number of token positions that go through the model, padding included."""
    num_real_tokens: int
    flops: float


def measure_share(micro_batches: Sequence[Batch], flops: ModelFlops) -> Share:
    """Count the tokens and FLOPs of a process's share of a global batch."""
    lengths = [length for batch in micro_batches for length in real_document_lengths(batch)]
    in_towers = [patches_of(batch) for batch in micro_batches]
    patches = {part: [number for one in in_towers for number in one.get(part, ())] for part in TOWERS}
    num_targets = sum(int(batch.signal.has_target.sum()) for batch in micro_batches)
    num_tokens = sum(batch.inputs.input_ids.numel() for batch in micro_batches)
    forward_only = sum(
        flops.forward(real_document_lengths(other), int(other.signal.has_target.sum()), patches_of(other))
        for batch in micro_batches
        if (other := batch.signal.mismatched)
    )
    learned = flops.training(lengths, num_targets, patches)
    return Share(micro_batches, num_tokens, sum(lengths), learned + forward_only)


@dataclass
class Positions:
    """Count of the token positions in this process's batches since its start, with and without padding."""

    num_tokens: int = 0
    num_real_tokens: int = 0

    def add(self, share: Share) -> None:
        self.num_tokens += share.num_tokens
        self.num_real_tokens += share.num_real_tokens

    def metrics(self, engine: Engine) -> dict[str, float]:
        """Return the padding's share of token positions over all processes; empty before the first step. Collective."""
        counts = torch.tensor([self.num_tokens, self.num_real_tokens], dtype=torch.float64)
        num_tokens, num_real_tokens = engine.sum_over_data(counts).tolist()
        return {"padding_fraction": 1 - num_real_tokens / num_tokens} if num_tokens else {}


def real_document_lengths(batch: Batch) -> list[int]:
    """Return the token count of every document that is not padding."""
    # tokens by document number; padding has numbers from `count` on, and is cut off
    lengths = torch.bincount(batch.documents.ids.flatten(), minlength=batch.documents.count)
    return lengths[: batch.documents.count].tolist()


def patches_of(batch: Batch) -> Patches:
    """Return the number of patches of each of a batch's media, by tower."""
    return batch.inputs.media.patches if batch.inputs.media else {}


def throughput(engine: Engine, share: Share, step_time_s: float, wait_s: float, peak: Peak | None) -> dict[str, float]:
    """Return a training step's tokens per second, wait for data, memory and MFU, over all processes. Collective."""
    sums = torch.tensor([share.num_tokens, share.num_real_tokens, share.flops, wait_s, 1], dtype=torch.float64)
    num_tokens, num_real_tokens, flops, waited_s, num_shares = engine.sum_over_data(sums).tolist()
    rates = {"tokens_per_s": num_tokens / step_time_s, "real_tokens_per_s": num_real_tokens / step_time_s}
    metrics = {
        "step_time_s": step_time_s,
        **rates,
        **{f"{name}_per_device": rate / engine.num_devices for name, rate in rates.items()},
        "data_wait_fraction": waited_s / num_shares / step_time_s,
        **peak_memory(engine.device, every_rank=1 < engine.num_devices <= MOST_PROCESSES_LISTED),
    }
    if peak:
        metrics["mfu"] = model_flops_utilization(flops, step_time_s, peak.flops_per_s, engine.num_devices)
    return metrics


def forget_peak_memory(device: torch.device) -> None:
    """Reset the peak counter of GPU memory (on a CPU: host memory, Linux only), to leave out a model's reading."""
    if device.type != "cpu":
        forget_peak(device)
        return
    give_back_freed_memory()  # it would count in the new peak
    with suppress(OSError):  # where the kernel has no such thing
        Path("/proc/self/clear_refs").write_text(FORGET_PEAK)


def peak_memory(device: torch.device, *, every_rank: bool) -> dict[str, float]:
    """Return the highest peak of GPU memory (host memory on a CPU) of a process since the reset, in GiB. Collective.

    With `every_rank`, each process's peak as well.
    """
    used_bytes = host_peak_bytes() if device.type == "cpu" else peak_bytes(device)
    by_rank = gathered(used_bytes / GIB)
    ranks = {f"peak_memory_gib_rank_{rank}": used_gib for rank, used_gib in enumerate(by_rank)} if every_rank else {}
    return {"peak_memory_gib": max(by_rank), **ranks}


def host_peak_bytes() -> int:
    """Return the peak of this process's resident memory in bytes.

    Linux's VmHWM is preferred: `getrusage` includes what the parent process held when it started this one.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    kib = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    return 1024 * (int(kib) if kib else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def communication_fraction(profiled: profile, step_time_s: float) -> float:
    """Return the share of a profiled training step in which a collective ran, hidden by computation or not."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiled.events() or ()
        if event.name.startswith(COLLECTIVES)
    )
    covered_us, reached_us = 0.0, 0.0
    for start, end in spans:
        # spans may overlap, and each microsecond counts once: (0, 4), (2, 6) -> 6
        covered_us += max(0.0, end - max(start, reached_us))
        reached_us = max(reached_us, end)
    return covered_us / 1e6 / step_time_s
