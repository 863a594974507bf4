"""Explanations of a planned layout in sentences: where its step time goes, and why other layouts were not chosen."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from heapq import nlargest

from stages.models.media import NOUNS, TOWERS, ModelPart
from stages.models.shape import ModelShape
from stages.parallel.layout import Layout
from stages.planner.memory import GIB
from stages.planner.search import UNCERTAINTY, Candidate, SearchResult, memory_fit
from stages.planner.time import training_flops
from stages.planner.towers import media_bytes
from stages.planner.workload import Workload

NUM_NEAR_MISSES = 5
LARGE_SHARE = 0.05
"""Smallest share of the step time at which an explanation of a layout names a kind of work, such as communication."""
MEANING = {
    "compute": "compute",
    "recompute": "recomputation",
    "offload": "copies of activations to the host and back",
    "tensor_parallel": "communication of tensor parallelism",
    "context_parallel": "communication of context parallelism",
    "expert_parallel": "communication of expert parallelism",
    "pipeline_messages": "messages between pipeline stages",
    "bubble": "pipeline bubble",
    "data_parallel": "communication of data parallelism",
    "optimizer": "optimizer step",
    "tower": "the towers of pictures and sounds",
    "method_passes": "forward passes of the method beside the one that learns",
}


@dataclass(frozen=True)
class PlannedMedia:
    """Pictures, or sounds, of the rows that are planned for, and what they cost."""

    part: ModelPart
    """Tower of these media."""
    per_row: float
    """Number of media of an average row."""
    most_patches: float
    """Number of patches of the row that has most."""
    flops_share: float
    """Share of a step's model FLOPs that the tower and its projector take."""
    memory_gib: float
    """GiB of the media, and of what the tower keeps of them, on a device."""

    @property
    def title(self) -> str:
        return f"{NOUNS[TOWERS[self.part]]}s"

    def __str__(self) -> str:
        return (
            f"{self.title}: {self.per_row:.1f} a row, at most {self.most_patches:,.0f} patches; the tower takes "
            f"{self.flops_share:.0%} of FLOPs and {self.memory_gib:.1f} GiB"
        )


def planned_media(shape: ModelShape, workload: Workload, layout: Layout) -> list[PlannedMedia]:
    """Return what the rows' media cost under a layout, by tower; none of text, or for a model that reads text alone."""
    flops, tokens = training_flops(shape, workload), workload.sequence_length
    by_tower = workload.media_by_tower(shape)
    whole = flops.training([tokens], tokens, {tower.part: media.of_row(tower) for tower, media in by_tower})
    planned = []
    for tower, media in by_tower:
        alone = flops.training([tokens], tokens, {tower.part: media.of_row(tower)}) - flops.training([tokens], tokens)
        memory = media_bytes(shape, layout, replace(workload, media=(media,)))
        planned.append(
            PlannedMedia(
                part=tower.part,
                per_row=media.mean_patches / media.each(tower),
                most_patches=media.most_patches,
                flops_share=alone / whole,
                memory_gib=(memory.kept + memory.workspace) / GIB,
            )
        )
    return planned


def what_limits(candidate: Candidate) -> str:
    """Return a sentence on a layout that names the largest shares of its step time and the device memory left."""
    parts, total_s = asdict(candidate.time.parts), candidate.time.step_time_s
    by_size = sorted(parts, key=lambda name: parts[name], reverse=True)
    large = [name for name in by_size if parts[name] >= LARGE_SHARE * total_s]
    shares = ", ".join(f"{MEANING[name]} {parts[name] / total_s:.0%}" for name in large)
    return f"{candidate.text} spends its step on {shares}; {_room(candidate)}"


def near_misses(result: SearchResult) -> list[str]:
    """Return a sentence on each runner-up with other parallel degrees: the memory it lacks, or the time it loses."""
    best = result.best
    if best is None:
        return [_too_large(candidate, None) for candidate in _of_other_degrees(result.too_large, [])]
    before = result.fitting.index(best)
    faster = _of_other_degrees(result.too_large, [best])
    tight = _of_other_degrees(result.fitting[:before], [best])
    slower = _of_other_degrees(result.fitting[before:], [best])
    too_full = [_too_large(one, best) for one in faster] + [_tight(one, best) for one in tight]
    return too_full + [_slower(one, best) for one in slower]


def _room(candidate: Candidate) -> str:
    return _device_room(candidate) + (f", {_of_host(candidate)}" if candidate.memory.host_gib else "")


def _of_host(candidate: Candidate) -> str:
    available = f" of {candidate.host_gib:,.1f}" if math.isfinite(candidate.host_gib) else ""
    return f"{candidate.memory.host_gib:,.1f}{available} GiB of the host's memory are needed for each"


def _device_room(candidate: Candidate) -> str:
    free_gib = candidate.available_gib - candidate.memory.peak_gib
    free = f"{free_gib:.1f} GiB free" if free_gib >= 0 else f"{-free_gib:.1f} GiB too little"
    if memory_fit(candidate.memory.peak_gib, candidate.available_gib) == "tight":
        return f"memory is tight ({free}, predicted to {UNCERTAINTY:.0%})"
    return f"it lacks {-free_gib:.1f} GiB of memory" if free_gib < 0 else f"{free_gib:.1f} GiB are free"


def _too_large(candidate: Candidate, best: Candidate | None) -> str:
    gain = ":" if best is None else _gain(candidate, best)
    if candidate.memory.host_gib > candidate.host_gib:
        return f"{candidate.text}{gain} lacks host memory: {_of_host(candidate)}"
    needed_gib = candidate.memory.peak_gib
    over_gib = needed_gib - candidate.available_gib
    causes = nlargest(2, asdict(candidate.memory.fullest).items(), key=lambda part: part[1])
    named = ", ".join(f"{name.replace('_', ' ')} {gib:.1f}" for name, gib in causes)
    return f"{candidate.text}{gain} lacks {over_gib:.1f} GiB: {needed_gib:.1f} GiB ({named})"


def _tight(candidate: Candidate, best: Candidate) -> str:
    free_gib = candidate.available_gib - candidate.memory.peak_gib
    return f"{candidate.text}{_gain(candidate, best)} is tight: {free_gib:.1f} GiB are free"


def _gain(candidate: Candidate, best: Candidate) -> str:
    return f", would be {1 - candidate.time.mean_step_s / best.time.mean_step_s:.0%} faster, but"


def _slower(candidate: Candidate, best: Candidate) -> str:
    own, other = asdict(candidate.time.parts), asdict(best.time.parts)
    lost = {name: own[name] - other[name] for name in own}
    name = max(lost, key=lambda name: lost[name])
    slower = candidate.time.mean_step_s / best.time.mean_step_s - 1
    return f"{candidate.text} is {slower:.0%} slower: {MEANING[name]} +{lost[name]:.3g} s"


def _of_other_degrees(candidates: Sequence[Candidate], seen: Sequence[Candidate]) -> list[Candidate]:
    """Return the first layout for each combination of engine and parallel degrees that no layout in `seen` has."""
    met = {_degrees(one.engine, one.layout) for one in seen}
    others = []
    for candidate in candidates:
        degrees = _degrees(candidate.engine, candidate.layout)
        if degrees not in met:
            met.add(degrees)
            others.append(candidate)
        if len(others) == NUM_NEAR_MISSES:
            break
    return others


def _degrees(engine: str, layout: Layout) -> tuple[str | int, ...]:
    return engine, layout.tp, layout.pp, layout.cp, layout.ep
