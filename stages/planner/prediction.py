"""Predictions for a train stage's layout: its metrics, its JSON record, and an error for a layout that lacks memory."""

from collections.abc import Sequence
from dataclasses import replace
from heapq import nlargest
from typing import Any

from stages.core.errors import LayoutError
from stages.planner.costs import SearchRequest
from stages.planner.hardware import Efficiency
from stages.planner.memory import SamplingMemory, memory
from stages.planner.search import UNCERTAINTY, Candidate, fitting_layouts, memory_fit

NUM_ALTERNATIVES = 5
NUM_PARTS_NAMED = 3
MOST_SHARE = 0.92
"""Largest share of a device's memory for a sampling server: vLLM's default."""


def predicted_metrics(candidate: Candidate) -> dict[str, float]:
    """Return a layout's predicted step time, memory and pipeline bubble as metrics (`predicted_step_time_s`, …)."""
    metrics = {
        "predicted_step_time_s": candidate.time.step_time_s,
        "predicted_memory_gib": candidate.memory.worst.total,
    }
    if candidate.memory.sampling:
        metrics["predicted_sampling_memory_gib"] = candidate.memory.sampling.total
    if candidate.layout.pp > 1:
        metrics["predicted_pipeline_bubble_fraction"] = candidate.time.bubble_fraction
    return metrics


def check_memory(request: SearchRequest, candidate: Candidate, available_gib: float) -> None:
    """Raise LayoutError, naming one that fits, if a layout needs too much even at 10% less than predicted."""
    needed_gib = candidate.memory.peak_gib
    if memory_fit(needed_gib, available_gib) != "does not fit":
        return
    parts = nlargest(NUM_PARTS_NAMED, vars(candidate.memory.fullest).items(), key=lambda part: part[1])
    largest = ", ".join(f"{name} {gib:.1f}" for name, gib in parts)
    when = " while completions are sampled" if candidate.memory.fullest is candidate.memory.sampling else ""
    raise LayoutError(
        f"the layout {candidate.text} would run out of memory{when}: predicted "
        f"{needed_gib:.1f} GiB a device ({largest}), available {available_gib:.1f} GiB; "
        f"{_advice(replace(request, available_gib=available_gib), candidate)}"
    )


def server_share(sampling: SamplingMemory, total_gib: float, efficiency: Efficiency) -> float:
    """Return the share of a device's memory for a server that samples on it, beside what the training keeps there."""
    kept_gib = (1 + UNCERTAINTY) * sampling.training_states + efficiency.runtime_gib
    return max(0.0, min(MOST_SHARE, 1 - kept_gib / total_gib))


def teacher_memory_gib(request: SearchRequest, candidate: Candidate) -> float:
    """Return a teacher's GiB per device: weights, a micro-batch without gradients. request: has its shape."""
    # The adapter belongs to the model that learns, not to its teacher; one micro-batch has no sums of gradients.
    whole = replace(request.workload, adapter=None, global_batch_size=1)
    return memory(request.shape, candidate.engine, candidate.layout, whole, learns=False).peak_gib


def check_teacher_memory(teacher_gib: float, candidate: Candidate, available_gib: float, *, beside_model: bool) -> None:
    """Raise LayoutError if a teacher does not fit. beside_model: the trained model is in memory, too."""
    needed_gib = teacher_gib + (candidate.memory.peak_gib if beside_model else 0)
    if memory_fit(needed_gib, available_gib) != "does not fit":
        return
    beside = f" and {candidate.memory.peak_gib:.1f} GiB of the model that learns" if beside_model else ""
    raise LayoutError(
        f"the teacher would run out of memory under the layout {candidate.text}: predicted {teacher_gib:.1f} GiB a "
        f"device{beside}, available {available_gib:.1f} GiB; shard it over more devices, or have it served "
        "(`teacher_server`)"
    )


def alternatives(request: SearchRequest) -> tuple[Candidate, ...]:
    """Return the five fastest layouts that fit in memory, recorded as alternatives to the chosen one."""
    return fitting_layouts(request)[:NUM_ALTERNATIVES]


def as_json(candidate: Candidate) -> dict[str, Any]:
    """Return a layout with its predicted time and memory as a JSON object."""
    return {
        "layout": candidate.text,
        "step_time_s": candidate.time.step_time_s,
        "memory_gib": candidate.memory.peak_gib,
        "step_time_parts_s": vars(candidate.time.parts),
        "memory_parts_gib": vars(candidate.memory.worst),
        **sampling_parts(candidate),
    }


def sampling_parts(candidate: Candidate) -> dict[str, Any]:
    """Return the memory while a server samples on the same devices as a JSON field; {} without such a server."""
    sampling = candidate.memory.sampling
    return {"sampling_memory_parts_gib": vars(sampling)} if sampling else {}


def closest(candidate: Candidate, fitting: Sequence[Candidate]) -> Candidate:
    """Return the fitting layout that differs in the fewest fields from a given one, of several the fastest."""
    own = candidate.layout.model_dump()

    def distance(one: Candidate) -> int:
        other = one.layout.model_dump()
        # Another engine weighs more than all fields of a layout together.
        return 100 * (one.engine != candidate.engine) + sum(own[name] != other[name] for name in own)

    return min(fitting, key=lambda one: (distance(one), one.time.mean_step_s))


def _advice(request: SearchRequest, candidate: Candidate) -> str:
    fitting = fitting_layouts(request)
    if not fitting:
        return f"no layout of {request.num_gpus} devices fits: take more devices, or shorter rows"
    best = closest(candidate, fitting)
    return f"the closest that fits: {best.text} ({best.memory.peak_gib:.1f} GiB)"
