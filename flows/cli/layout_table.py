"""Output of `lifecycle layouts`: parallel layouts with predicted memory and step time, as text and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flows.planning.layout_advice import MORE_DEVICES, Explained, Ranked
from stages.models.media import TOWERS, in_words
from stages.parallel.engines.registry import RULES
from stages.planner.compilation import not_compiled
from stages.planner.costs import SearchRequest
from stages.planner.explain import near_misses, planned_media, what_limits
from stages.planner.memory import GIB
from stages.planner.prediction import sampling_parts
from stages.planner.search import UNCERTAINTY, Candidate
from stages.planner.time import step_traffic

SECONDS_PER_DAY = 86400
COLUMNS = {
    "engine": "engine",
    "dp_replicate": "dpr",
    "dp_shard": "dps",
    "tp": "tp",
    "pp": "pp",
    "vpp": "vpp",
    "cp": "cp",
    "ep": "ep",
    "micro_batch_size": "mbs",
    "recompute": "recompute",
}
"""Column headings of the table of parallel layouts, by config field of a layout."""
MEMORY_GROUPS = {
    "states": ("weights", "gradients", "optimizer"),
    "activ.": ("activations", "workspace"),
    "logits": ("logits",),
    "other": ("communication", "runtime"),
}
TIME_GROUPS = {
    "compute": ("compute", "recompute", "offload", "tower", "method_passes"),
    "tp+cp+ep": ("tensor_parallel", "context_parallel", "expert_parallel"),
    "pipeline": ("pipeline_messages", "bubble"),
    "dp": ("data_parallel",),
    "adam": ("optimizer",),
}


def row_as_json(candidate: Candidate, request: SearchRequest) -> dict[str, Any]:
    """Return a layout and its predicted memory, step time and throughput as an object for `--json`."""
    media = planned_media(request.shape, request.workload, candidate.layout)
    return {
        "engine": candidate.engine,
        **candidate.layout.model_dump(),
        "memory_gib": candidate.memory.peak_gib,
        "host_memory_gib": candidate.memory.host_gib,
        "step_time_s": candidate.time.step_time_s,
        "tokens_per_s_per_gpu": candidate.time.tokens_per_s_per_gpu,
        "mfu": candidate.time.mfu,
        "fits": candidate.fits,
        "memory_fit": candidate.memory_fit,
        "memory_parts_gib": asdict(candidate.memory.worst),
        **sampling_parts(candidate),
        "step_time_parts_s": asdict(candidate.time.parts),
        "bubble_fraction": candidate.time.bubble_fraction,
        "reference_pass_s": candidate.time.reference_pass_s,
        "compilation_s_per_step": candidate.time.compilation_s,
        **{one.title: asdict(one) for one in media},
        **dict(zip(("days", "gpu_hours"), _days_and_gpu_hours(candidate, request), strict=True)),
    }


def ranked_as_json(answer: Ranked) -> dict[str, Any]:
    """Return the ranked layouts as an object for `--json`, with everything that the text output shows."""
    best, request = answer.result.best, answer.request
    return {
        **_request_as_json(answer.request),
        "num_legal": answer.result.num_legal,
        "num_fitting": len(answer.result.fitting),
        "layouts": [row_as_json(candidate, answer.request) for candidate in answer.shown],
        "why": what_limits(best) if best else None,
        "not_compiled": _why_not_compiled(request),
        "near_misses": near_misses(answer.result),
        "remedies": list(answer.remedies),
    }


def ranked_as_text(answer: Ranked) -> str:
    """Return the ranked layouts as a table, one line for each layout, and the reasons for the ranking."""
    best, request = answer.result.best, answer.request
    lines = [_headline(request), *_media(request, answer.shown[0]), *_table(answer.shown, request), ""]
    if best is None:
        lines.append(_nothing_fits(answer))
    else:
        lines += [f"why: {what_limits(best)}", _margin(best), *_compilation(request), _duration(best, request)]
    missed = [f"  {miss}" for miss in near_misses(answer.result)]
    return "\n".join([*lines, *(["near misses:", *missed] if missed else [])])


def _nothing_fits(answer: Ranked) -> str:
    """Return what the nearest layout lacks, and the options with which one would fit."""
    nearest, most = near_misses(answer.result)[0], MORE_DEVICES[-1] * answer.request.num_gpus
    remedies = " or ".join(answer.remedies) or f"not even {most} devices: shorten rows (--seq-len), or the model"
    return f"nothing fits, with recomputation and offloading either; nearest is {nearest}\nwould fit: {remedies}"


def explained_as_json(answer: Explained) -> dict[str, Any]:
    """Return one layout's predictions as an object for `--json`, with the memory of each pipeline stage."""
    return {
        **_request_as_json(answer.request),
        "layout": row_as_json(answer.candidate, answer.request),
        "stages_memory_gib": [{**asdict(stage), "total": stage.total} for stage in answer.candidate.memory.stages],
        "collectives_gib": _traffic_gib(answer),
        "why": what_limits(answer.candidate),
        "warnings": list(answer.warnings),
    }


def explained_as_text(answer: Explained) -> str:
    """Return one layout's predictions in full, as text: memory by pipeline stage, step time by cause, warnings."""
    candidate, request = answer.candidate, answer.request
    traffic = [f"{kind} {gib:,.1f}" for kind, gib in _traffic_gib(answer).items()]
    lines = [
        _headline(request),
        *_media(request, candidate),
        f"{candidate.text}: {candidate.memory.peak_gib:.1f} of {candidate.available_gib:.1f} GiB, "
        f"{candidate.memory_fit}",
        "memory of a rank, GiB:",
        *_stages(candidate),
        *_sampling(candidate),
        f"step: {candidate.time.step_time_s:.3g} s, {candidate.time.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, "
        f"MFU {candidate.time.mfu:.1%}",
        *(
            f"  {name.replace('_', ' '):<18} {value:9.3f} s"
            for name, value in asdict(candidate.time.parts).items()
            if value
        ),
        *([f"collectives of a rank, GiB a step: {', '.join(traffic)}"] if traffic else []),
        f"why: {what_limits(candidate)}",
        _margin(candidate),
        _duration(candidate, request),
    ]
    return "\n".join([*lines, *(f"warning: {warning}" for warning in answer.warnings)])


def _request_as_json(request: SearchRequest) -> dict[str, Any]:
    workload = request.workload
    return {
        "parameters": request.shape.num_parameters,
        "gpu": request.hardware.name,
        "gpus": request.num_gpus,
        "gpus_per_node": request.hardware.gpus_per_node,
        "sequence_length": workload.sequence_length,
        "global_batch_size": workload.global_batch_size,
        "precision": workload.precision,
        "memory_uncertainty": UNCERTAINTY,
    }


def _headline(request: SearchRequest) -> str:
    workload, number = request.workload, request.shape.num_parameters
    count = f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"
    return (
        f"{count} parameters on {request.num_gpus} × {request.hardware.name}, "
        f"{workload.global_batch_size:,} rows of {workload.sequence_length:,} tokens a step, {workload.precision}"
    )


def _media(request: SearchRequest, candidate: Candidate) -> list[str]:
    """Return lines on the rows' media under a layout; where nothing bounds them, on a model with towers, why not."""
    if request.shape.towers and not request.workload.media:
        kinds = in_words([TOWERS[one.part] for one in request.shape.towers])
        return [f"{kinds}: none planned; a recipe's `data.max_patches` bounds those of a row"]
    return [*map(str, planned_media(request.shape, request.workload, candidate.layout))]


def _table(candidates: Sequence[Candidate], request: SearchRequest) -> list[str]:
    headings = (*COLUMNS.values(), "GiB", "memory", *MEMORY_GROUPS, "step s", *TIME_GROUPS, "tok/s/GPU", "MFU")
    headings += ("days", "GPU-hours") if request.workload.total_tokens else ()
    return _aligned([headings, *(_cells(candidate, request) for candidate in candidates)])


def _cells(candidate: Candidate, request: SearchRequest) -> tuple[str, ...]:
    layout = {"engine": candidate.engine, **candidate.layout.model_dump()}
    if layout["cpu_offload"]:
        layout["recompute"] += "+cpu_offload"
    if layout["compile"]:
        layout["recompute"] += "+compile"
    memory, parts = asdict(candidate.memory.worst), asdict(candidate.time.parts)
    days, gpu_hours = _days_and_gpu_hours(candidate, request)
    return (
        *(str(layout[name]) for name in COLUMNS),
        f"{candidate.memory.peak_gib:.1f}",
        candidate.memory_fit,
        *(f"{sum(memory[name] for name in names):.1f}" for names in MEMORY_GROUPS.values()),
        f"{candidate.time.step_time_s:.3g}",
        *(f"{sum(parts[name] for name in names):.2f}" for names in TIME_GROUPS.values()),
        f"{candidate.time.tokens_per_s_per_gpu:,.0f}",
        f"{candidate.time.mfu:.1%}",
        *(() if days is None else (f"{days:.3g}", f"{gpu_hours:,.0f}")),
    )


def _stages(candidate: Candidate) -> list[str]:
    stages = list(enumerate(candidate.memory.stages))
    shown = stages if len(stages) <= 8 else [*stages[:3], *stages[-2:]]
    headings = ("stage", "total", *(name.replace("_", " ") for name in asdict(candidate.memory.worst)))
    rows = ((str(index), *(f"{gib:.1f}" for gib in (stage.total, *asdict(stage).values()))) for index, stage in shown)
    return [f"  {line}" for line in _aligned([headings, *rows])]


def _sampling(candidate: Candidate) -> list[str]:
    """Return lines on the memory of a device that training and a sampling server share; none without such a server."""
    sampling = candidate.memory.sampling
    if sampling is None:
        return []
    parts = ", ".join(f"{name.replace('_', ' ')} {gib:.1f}" for name, gib in asdict(sampling).items())
    return [
        f"memory while completions are sampled on the same devices, GiB: {sampling.total:.1f} ({parts})",
        f"memory that the sleeping server keeps meanwhile, GiB: {candidate.memory.asleep_gib:.1f}",
    ]


def _traffic_gib(answer: Explained) -> dict[str, float]:
    """Return the GiB that collectives of a rank of the first pipeline stage carry in a step, by kind."""
    request, candidate = answer.request, answer.candidate
    carried = step_traffic(request.shape, candidate.engine, candidate.layout, request.workload)
    return {kind: size / GIB for kind, size in sorted(carried.items())}


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _margin(candidate: Candidate) -> str:
    """Return a sentence with the predicted memory, in GiB, up to which a layout counts as `fits` and as `tight`."""
    least, most = (1 - UNCERTAINTY) * candidate.available_gib, candidate.available_gib / (1 - UNCERTAINTY)
    return f"memory: fits up to {least:.1f} GiB, tight up to {most:.1f}: predictions may be off by {UNCERTAINTY:.0%}"


def _why_not_compiled(request: SearchRequest) -> str | None:
    """Return why no layout of the search compiles layers; None if some do, or if no engine searched can."""
    can = any("compile" in RULES[engine].own_fields for engine in request.engines)
    return not_compiled(request) if can else None


def _compilation(request: SearchRequest) -> list[str]:
    why = _why_not_compiled(request)
    return [f"compile: not tried; {why}"] if why else []


def _duration(candidate: Candidate, request: SearchRequest) -> str:
    days, gpu_hours = _days_and_gpu_hours(candidate, request)
    if days is None:
        return "days: unknown; the recipe does not say how many tokens (give --tokens)"
    return f"{request.workload.total_tokens:.3g} tokens: {days:.3g} days, {gpu_hours:,.0f} GPU-hours"


def _days_and_gpu_hours(candidate: Candidate, request: SearchRequest) -> tuple[float | None, float | None]:
    """Return the training's predicted days and GPU-hours, reference passes included; None without total tokens."""
    tokens = request.workload.total_tokens
    if tokens is None:
        return None, None
    steps = tokens / request.workload.tokens_per_step
    days = steps * (candidate.time.mean_step_s + candidate.time.reference_pass_s) / SECONDS_PER_DAY
    return days, days * 24 * request.num_gpus
