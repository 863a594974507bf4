"""All legal layouts of a model on a number of devices, ranked by predicted step time. Pure.

Memory is estimated first, since it is cheap and rules most layouts out; the time of a layout that does not fit is only
estimated for those that come near, to say what they would have won. Layouts that are never better than another of the
same degrees are left out: tensor parallelism without sequence parallelism or beyond a node, uneven interleaving.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from stages.core.errors import LayoutError
from stages.models.shape import ModelShape
from stages.parallel.layout import EngineName, Layout
from stages.parallel.legality import Setting, is_legal
from stages.planner.hardware import Hardware
from stages.planner.memory import MemoryEstimate, memory
from stages.planner.time import TimeEstimate, step_time
from stages.planner.workload import OURS, Software, Workload, our_software

LEAST_TOKENS_OF_A_CONTEXT_RANK = 1024
LARGEST_MICRO_BATCH_TOKENS = 65536
INTERLEAVINGS = (1, 2, 3, 4, 5, 6, 8)
NEAR_MISS = 1.6
"""Memory over what there is, up to which a layout's time is estimated all the same."""
ENGINES: tuple[EngineName, ...] = ("fsdp", "megatron")


@dataclass(frozen=True)
class Candidate:
    """A layout with its estimates."""

    engine: EngineName
    layout: Layout
    memory: MemoryEstimate
    time: TimeEstimate
    available_gib: float

    @property
    def fits(self) -> bool:
        """Whether the fullest rank's memory is there."""
        return self.memory.peak_gib <= self.available_gib


@dataclass(frozen=True)
class SearchResult:
    """Those that fit, fastest first, and those that would be faster than the best but do not fit, fastest first.

    Where nothing fits, `too_large` has the layouts of least memory first; one of the two is never empty.
    """

    fitting: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    num_legal: int

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits."""
        return self.fitting[0] if self.fitting else None


@dataclass(frozen=True)
class Question:
    """What a layout is looked for."""

    shape: ModelShape
    workload: Workload
    hardware: Hardware
    num_gpus: int
    engines: tuple[EngineName, ...] = ENGINES
    software: Software | None = None
    available_gib: float | None = None
    """Of each device; default: all that the hardware has."""

    @property
    def setting(self) -> Setting:
        """As `legality` takes it."""
        per_node = min(self.num_gpus, self.hardware.gpus_per_node)
        rows = self.workload.global_batch_size
        return Setting(-(-self.num_gpus // per_node), per_node, self.workload.sequence_length, rows)


def search(question: Question) -> SearchResult:
    """Rank all legal layouts. Raises LayoutError where there is none, naming the nearest number that has one."""
    found = _search(question, NEAR_MISS)
    return found if found.fitting or found.too_large else _search(question, math.inf)


def _search(question: Question, near_miss: float) -> SearchResult:
    fitting: list[Candidate] = []
    too_large: list[Candidate] = []
    num_legal = 0
    for engine in question.engines:
        for variants in _groups(question, engine):
            for layout in variants:
                num_legal += 1
                candidate = estimate(question, engine, layout, near_miss)
                if candidate is not None:
                    (fitting if candidate.fits else too_large).append(candidate)
                if engine == "megatron" and (candidate is None or not candidate.fits):
                    break  # larger micro-batches take more; under fsdp the largest has no gradients to add up
    if not num_legal:
        raise LayoutError(_no_layout(question))
    fitting.sort(key=_step_time_s)
    best_s = _step_time_s(fitting[0]) if fitting else float("inf")
    faster = sorted((candidate for candidate in too_large if _step_time_s(candidate) < best_s), key=_step_time_s)
    return SearchResult(tuple(fitting), tuple(faster if fitting else sorted(too_large, key=_peak_gib)), num_legal)


def estimate(
    question: Question, engine: EngineName, layout: Layout, near_miss: float | None = None
) -> Candidate | None:
    """One layout's estimates; None if it takes more than `near_miss` times the memory there is."""
    hardware, software = question.hardware, question.software or our_software(engine, layout)
    available_gib = question.available_gib or hardware.memory_gib
    needed = memory(
        question.shape,
        engine,
        layout,
        question.workload,
        software=software,
        efficiency=hardware.efficiency,
        every_stage=near_miss is None,
    )
    if near_miss is not None and needed.peak_gib > near_miss * available_gib:
        return None
    time = step_time(question.shape, engine, layout, question.workload, hardware, software=software)
    return Candidate(engine, layout, needed, time, available_gib)


def legal_layouts(question: Question, engine: EngineName) -> Iterator[Layout]:
    """Every legal layout worth looking at."""
    for variants in _groups(question, engine):
        yield from variants


def _groups(question: Question, engine: EngineName) -> Iterator[list[Layout]]:
    """Legal layouts that differ in the micro-batch only, smallest (of least memory) first."""
    setting = question.setting
    for degrees in _fsdp(question) if engine == "fsdp" else _megatron(question):
        shares = degrees["dp_shard"] * degrees.get("dp_replicate", 1)
        sizes = _micro_batch_sizes(question, shares)
        layouts = (Layout.model_construct(**{**DEFAULTS, **degrees, "micro_batch_size": size}) for size in sizes)
        legal = [layout for layout in layouts if is_legal(engine, layout, setting, question.shape)]
        if legal:
            yield legal


DEFAULTS = Layout().model_dump()


def _fsdp(question: Question) -> Iterator[dict]:
    for dp_shard in sorted({question.num_gpus, min(question.num_gpus, question.hardware.gpus_per_node)}):
        if question.num_gpus % dp_shard:
            continue
        degrees = {"dp_shard": dp_shard, "dp_replicate": question.num_gpus // dp_shard}
        for recompute in ("none", "selective", "full"):
            for reshard in (True, False) if dp_shard > 1 else (True,):
                yield {**degrees, "recompute": recompute, "reshard_after_forward": reshard}
        yield {**degrees, "recompute": "full", "cpu_offload": True}


def _megatron(question: Question) -> Iterator[dict]:
    shape = question.shape
    for tp in _divisors(min(question.num_gpus, question.hardware.gpus_per_node)):
        for pp in _divisors(question.num_gpus // tp, shape.num_layers):
            for cp in _context_degrees(question, question.num_gpus // (tp * pp)):
                shares = question.num_gpus // (tp * pp * cp)
                for ep in _expert_degrees(shape, shares * tp * cp):
                    degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "sequence_parallel": tp > 1}
                    yield from _megatron_variants(question, degrees, shares)


def _megatron_variants(question: Question, degrees: dict, shares: int) -> Iterator[dict]:
    per_stage = question.shape.num_layers // degrees["pp"]
    even = question.shape.num_layers % degrees["pp"] == 0
    chunks = [vpp for vpp in INTERLEAVINGS if vpp == 1 or (degrees["pp"] > 1 and even and per_stage % vpp == 0)]
    for vpp in chunks:
        for dp_shard in {shares, 1}:
            for recompute in ("none", "full") if _flash(question) else ("none", "selective", "full"):
                variant = {"vpp": vpp, "dp_shard": dp_shard, "dp_replicate": shares // dp_shard, "recompute": recompute}
                yield {**degrees, **variant}


def _flash(question: Question) -> bool:
    return (question.software or OURS["megatron"]).flash_attention


def _micro_batch_sizes(question: Question, shares: int) -> list[int]:
    """Powers of two that divide a data-parallel share of the batch."""
    rows, rest = divmod(question.workload.global_batch_size, shares)
    if rest:
        return []
    most = max(1, LARGEST_MICRO_BATCH_TOKENS // question.workload.sequence_length)
    return [size for size in _powers_of_two(min(rows, most)) if rows % size == 0]


def _context_degrees(question: Question, num_ranks: int) -> list[int]:
    most = max(1, question.workload.sequence_length // LEAST_TOKENS_OF_A_CONTEXT_RANK // 2)
    return [cp for cp in _powers_of_two(most) if num_ranks % cp == 0]


def _expert_degrees(shape: ModelShape, num_ranks: int) -> list[int]:
    if not shape.num_experts:
        return [1]
    return [ep for ep in _divisors(shape.num_experts) if num_ranks % ep == 0]


def _powers_of_two(most: int) -> Iterable[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _divisors(number: int, most: int | None = None) -> list[int]:
    return [divisor for divisor in range(1, min(number, most or number) + 1) if number % divisor == 0]


def _no_layout(question: Question) -> str:
    nearest = _nearest(question)
    advice = f"the nearest number that has one: {nearest}" if nearest else "try another global batch size"
    return (
        f"looking for a layout of {question.num_gpus} GPUs: none is legal for a global batch of "
        f"{question.workload.global_batch_size} rows of {question.workload.sequence_length} tokens; {advice}"
    )


def _nearest(question: Question) -> int | None:
    for distance in range(1, question.num_gpus + 1):
        for number in (question.num_gpus - distance, question.num_gpus + distance):
            if number > 0 and _has_layout(replace(question, num_gpus=number)):
                return number
    return None


def _has_layout(question: Question) -> bool:
    return any(next(_groups(question, engine), None) is not None for engine in question.engines)


def _step_time_s(candidate: Candidate) -> float:
    return candidate.time.step_time_s


def _peak_gib(candidate: Candidate) -> float:
    return candidate.memory.peak_gib
