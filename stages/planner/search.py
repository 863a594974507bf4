"""Search of all legal layouts of a model on a number of devices, ranked by predicted step time.

Memory, cheaply estimated, rules most layouts out; the time of one that lacks a little is estimated to state what it
would have gained. Engines leave dominated layouts out.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from stages.core.errors import LayoutError
from stages.parallel.engines.registry import RULES
from stages.parallel.layout import EngineName, Layout, describe_layout
from stages.parallel.legality import adapter_errors, feature_errors, is_legal
from stages.planner.costs import SearchRequest
from stages.planner.engines.registry import COSTS
from stages.planner.memory import MemoryEstimate, memory
from stages.planner.time import TimeEstimate, step_time

LARGEST_MICRO_BATCH_TOKENS = 65536
NEAR_MISS = 1.6
"""Largest ratio of predicted to available memory up to which a step time is predicted for layouts that do not fit."""
UNCERTAINTY = 0.1
"""Assumed relative error of predicted memory: actual memory may be higher or lower by this share."""
MemoryFit = Literal["fits", "tight", "does not fit"]


def memory_fit(peak_gib: float, available_gib: float) -> MemoryFit:
    """Return whether predicted memory fits, does not fit or is tight: 10% would change the answer."""
    if peak_gib <= (1 - UNCERTAINTY) * available_gib:
        return "fits"
    return "tight" if (1 - UNCERTAINTY) * peak_gib <= available_gib else "does not fit"


@dataclass(frozen=True)
class Candidate:
    """Layout with its predicted memory and step time."""

    engine: EngineName
    layout: Layout
    memory: MemoryEstimate
    time: TimeEstimate
    available_gib: float
    """Memory of a device in GiB."""
    host_gib: float
    """Memory of the host in GiB for each process; infinite if unknown."""

    @property
    def memory_fit(self) -> MemoryFit:
        """Answer whether the fullest process rank fits in memory, of device and host: `fits`, `tight` or not."""
        return memory_fit(_share_needed(self.memory, self.available_gib, self.host_gib), 1.0)

    @property
    def text(self) -> str:
        """Layout as one line of text: the engine, and the fields that differ from the default layout."""
        return describe_layout(self.engine, self.layout)

    @property
    def fits(self) -> bool:
        """True if the layout fits in memory even if the prediction is 10% too low."""
        return self.memory_fit == "fits"


def safest_first(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Sort layouts that fit before layouts whose memory is tight; the order within each kind stays."""
    return tuple(sorted(candidates, key=lambda one: not one.fits))


@dataclass(frozen=True)
class SearchResult:
    """Result of a layout search: layouts that fit or are tight, and faster ones that lack memory, each fastest first.

    If nothing fits, `too_large`, never empty then, holds all layouts, least memory first.
    """

    fitting: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    num_legal: int

    @property
    def best(self) -> Candidate | None:
        """Fastest layout that fits; if none fits, the fastest tight layout; otherwise None."""
        return next(iter(safest_first(self.fitting)), None)


def search(request: SearchRequest) -> SearchResult:
    """Rank all legal layouts by predicted step time; without one, LayoutError names the nearest number of devices."""
    found = _search(request, NEAR_MISS)
    # Nothing comes near the memory: all are estimated, for the answer which needs least.
    return found if found.fitting or found.too_large else _search(request, math.inf)


def fitting_layouts(request: SearchRequest) -> tuple[Candidate, ...]:
    """Return the layouts that fit in memory, fastest first, then tight ones; empty if no layout is legal."""
    try:
        return safest_first(search(request).fitting)
    except LayoutError:
        return ()


def estimate(request: SearchRequest, engine: EngineName, layout: Layout) -> Candidate:
    """Predict a layout's step time and all stages' memory, fitting or not; `accumulate: auto` may become `sharded`."""
    return _with_time(request, engine, *_with_memory(request, engine, layout, every_stage=True))


def has_fitting(request: SearchRequest) -> bool:
    """Return whether a layout fits in memory; quicker than a search, as no step time is estimated."""
    for engine in _engines(request):
        for variants in _groups(request, engine):
            for layout in variants:
                _, needed = _with_memory(request, engine, layout, every_stage=False)
                if _share_needed(needed, request.memory_gib, request.host_gib) <= 1:
                    return True
                if COSTS[engine].more_with_batch:
                    break
    return False


def legal_layouts(request: SearchRequest) -> Iterator[tuple[EngineName, Layout]]:
    """Yield every legal layout with its engine, without layouts that another one always beats."""
    for engine in _engines(request):
        for variants in _groups(request, engine):
            yield from ((engine, layout) for layout in variants)


def _search(request: SearchRequest, near_miss: float) -> SearchResult:
    fitting: list[Candidate] = []
    too_large: list[Candidate] = []
    num_legal = 0
    for engine in _engines(request):
        for variants in _groups(request, engine):
            for layout in variants:
                num_legal += 1
                chosen, needed = _with_memory(request, engine, layout, every_stage=False)
                share = _share_needed(needed, request.memory_gib, request.host_gib)
                fits = share <= 1
                # A step time costs more than an estimate of memory; a layout far beyond the memory gets none.
                if share <= near_miss:
                    (fitting if fits else too_large).append(_with_time(request, engine, chosen, needed))
                # Sizes ascend within a group, so the following ones do not fit either.
                if COSTS[engine].more_with_batch and not fits:
                    break
    if not num_legal:
        raise LayoutError(_no_layout(request))
    fitting.sort(key=_mean_step_s)
    best_s = _mean_step_s(fitting[0]) if fitting else math.inf
    # A layout that lacks memory is of interest only if more memory would make training faster.
    faster = sorted((candidate for candidate in too_large if _mean_step_s(candidate) < best_s), key=_mean_step_s)
    by_memory = sorted(too_large, key=lambda one: _share_needed(one.memory, one.available_gib, one.host_gib))
    return SearchResult(tuple(fitting), tuple(faster if fitting else by_memory), num_legal)


def _engines(request: SearchRequest) -> list[EngineName]:
    """Return the engines of a search that have all that the training uses."""
    return [one for one in request.engines if not any(work_errors(request, one))]


def work_errors(request: SearchRequest, engine: EngineName) -> Iterator[str]:
    """Yield why an engine cannot do the work of a search under any layout, such as an option that it lacks."""
    yield from feature_errors(engine, request.workload.features(request.shape))
    if adapter := request.workload.adapter:
        yield from adapter_errors(engine, adapter.used_options)
        yield from adapter.base_errors(request.shape)


def _with_memory(
    request: SearchRequest, engine: EngineName, layout: Layout, *, every_stage: bool
) -> tuple[Layout, MemoryEstimate]:
    """Return a layout's memory, and the layout with `accumulate: auto` replaced (`sharded` if gradients do not fit)."""
    needed = _memory(request, engine, layout, every_stage=every_stage)
    is_asked = "accumulate" in RULES[engine].own_fields and layout.accumulate == "auto"
    # Shards of gradients have the precision of the stored weights: in bf16 their sum would lose digits.
    adds_up_in_fp32 = request.workload.state_bytes.weight == 4
    if not is_asked or not adds_up_in_fp32 or memory_fit(needed.peak_gib, request.memory_gib) == "fits":
        return layout, needed
    sharded = layout.model_copy(update={"accumulate": "sharded"})
    less = _memory(request, engine, sharded, every_stage=every_stage)
    return (sharded, less) if less.peak_gib < needed.peak_gib else (layout, needed)


def _memory(request: SearchRequest, engine: EngineName, layout: Layout, *, every_stage: bool) -> MemoryEstimate:
    return memory(
        request.shape,
        engine,
        layout,
        request.workload,
        software=request.software or COSTS[engine].program(layout, request.hardware),
        efficiency=request.hardware.efficiency,
        every_stage=every_stage,
        server=request.server,
    )


def _with_time(request: SearchRequest, engine: EngineName, layout: Layout, needed: MemoryEstimate) -> Candidate:
    time = step_time(request.shape, engine, layout, request.workload, request.hardware, software=request.software)
    return Candidate(engine, layout, needed, time, request.memory_gib, request.host_gib)


def _share_needed(needed: MemoryEstimate, available_gib: float, host_gib: float) -> float:
    """Return which share of its memory a process needs, of the device's or the host's, whichever is larger."""
    return max(needed.peak_gib / available_gib, needed.host_gib / host_gib)


def _groups(request: SearchRequest, engine: EngineName) -> Iterator[list[Layout]]:
    """Yield groups of legal layouts that differ only in micro-batch size, each sorted from small to large."""
    constraints, features = request.constraints, request.workload.features(request.shape)
    for degrees in COSTS[engine].degrees(request):
        shares = degrees["dp_shard"] * degrees.get("dp_replicate", 1)
        sizes = _micro_batch_sizes(request, shares)
        # Unvalidated, since thousands are made and `is_legal` refuses the bad ones.
        layouts = (Layout.model_construct(**{**DEFAULTS, **degrees, "micro_batch_size": size}) for size in sizes)
        legal = [layout for layout in layouts if is_legal(engine, layout, constraints, request.shape, features)]
        if legal:
            yield legal


DEFAULTS = Layout().model_dump()


def _micro_batch_sizes(request: SearchRequest, shares: int) -> list[int]:
    """Return the micro-batch sizes to search: powers of two that divide one rank's share of the global batch."""
    # Rows of a step for one data-parallel rank.
    rows, rest = divmod(request.workload.global_batch_size, shares)
    if rest:
        return []
    most = max(1, LARGEST_MICRO_BATCH_TOKENS // request.workload.sequence_length)
    return [2**power for power in range(min(rows, most).bit_length()) if rows % 2**power == 0]


def _no_layout(request: SearchRequest) -> str:
    if not _engines(request):
        errors = dict.fromkeys(error for engine in request.engines for error in work_errors(request, engine))
        return f"looking for a layout: {'; '.join(errors)}"
    nearest = _nearest(request)
    advice = f"the nearest number that has one: {nearest}" if nearest else "try another global batch size"
    return (
        f"looking for a layout of {request.num_gpus} GPUs: none is legal for a global batch of "
        f"{request.workload.global_batch_size} rows of {request.workload.sequence_length} tokens; {advice}"
    )


def _nearest(request: SearchRequest) -> int | None:
    for distance in range(1, request.num_gpus + 1):
        # Fewer devices before more, at the same distance.
        for number in (request.num_gpus - distance, request.num_gpus + distance):
            if number > 0 and any(legal_layouts(replace(request, num_gpus=number))):
                return number
    return None


def _mean_step_s(candidate: Candidate) -> float:
    return candidate.time.mean_step_s
