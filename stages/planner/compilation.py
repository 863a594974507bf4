"""Compilation of layers in a search of layouts: its time, and why a search leaves it out."""

from stages.planner.costs import SearchRequest
from stages.planner.workload import Workload

COMPILATION_S = 40.0
"""Assumed seconds until a training's layers and head are compiled, once, by all processes at the same time.

On two busy cores a layer took 16 to 48 s, most of them in the C++ compiler; no GPU has measured it."""
ASSUMED_STEPS = 1000
"""Number of a training's steps over which compilation is spread where the request does not say how many there are."""


def compilation_per_step_s(workload: Workload) -> float:
    """Return a step's share of the seconds that compiling layers takes once in a training."""
    tokens = workload.total_tokens
    return COMPILATION_S / (max(1.0, tokens / workload.tokens_per_step) if tokens else ASSUMED_STEPS)


def not_compiled(request: SearchRequest) -> str | None:
    """Return why the search has no layout that compiles layers, as a clause; None where it has."""
    if request.shape.num_experts:
        return "torch makes no single graph of a layer with experts"
    if not request.workload.even_rows:
        return "rows differ in length, and layers would be compiled again for each"
    if request.workload.media or request.shape.towers:  # a plan knows the model, and seldom its rows
        return "steps of models that see were not measured with compiled layers"
    if request.hardware.host_is_device:
        return "compiled layers were measured to be no faster on a CPU"
    if not request.hardware.compiles:
        return f"torch's compiler makes no kernels for {request.hardware.name}"
    return request.no_compiler
