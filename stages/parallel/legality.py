"""Checks whether a layout works for a number of processes, a batch size and a model; needs no torch.

Each error is a sentence with every factor in it, made lazily: a search calls `is_legal` for 100,000 layouts. A config
is checked for `layout_errors` when it is parsed, for its engine's `model_errors` when its model is there.
"""

import json
from collections.abc import Iterator

from stages.core.lines import counted
from stages.models.shape import ModelShape
from stages.parallel.engines.registry import RULES, lacked_feature
from stages.parallel.layout import EngineName, Layout, RunConstraints

DEFAULT = Layout()
FACTORS = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
"""Names of the parallel degrees whose product is the number of processes."""


def layout_errors(engine: EngineName, layout: Layout, constraints: RunConstraints) -> Iterator[str]:
    """Yield an error for each reason why the engine cannot run a layout, whatever the model."""
    yield from _other_engines_fields(engine, layout)
    if layout.recompute == "offload":
        yield from lacked_feature(engine, "activation_offload", "layout.recompute: offload")
    yield from _processes(engine, layout, constraints)
    yield from _batch(layout, constraints)
    yield from RULES[engine].layout_errors(layout, constraints)


def is_legal(engine: EngineName, layout: Layout, constraints: RunConstraints, shape: ModelShape) -> bool:
    """Return whether a parallel layout works for this run and model; the check stops at the first error."""
    return not any(layout_errors(engine, layout, constraints)) and not any(RULES[engine].model_errors(layout, shape))


def _other_engines_fields(engine: EngineName, layout: Layout) -> Iterator[str]:
    for other, rules in RULES.items():
        foreign = [name for name in rules.own_fields if name not in RULES[engine].own_fields]
        found = [name for name in foreign if getattr(layout, name) != getattr(DEFAULT, name)]
        if found:
            named = ", ".join(f"{name} {json.dumps(getattr(layout, name))}" for name in found)
            means, it = ("means", "it") if len(found) == 1 else ("mean", "them")
            yield (
                f"layout: {named} only {means} something with `engine: {other}`, but the engine is {engine}; remove "
                f"{it}, or change the engine"
            )


def _processes(engine: EngineName, layout: Layout, constraints: RunConstraints) -> Iterator[str]:
    if layout.world_size != constraints.processes:
        factors = (name for name in FACTORS if name in RULES[engine].factors or getattr(layout, name) > 1)
        degrees = " × ".join(f"{name} {getattr(layout, name)}" for name in factors)
        yield (
            f"layout: {degrees} = {layout.world_size} processes, but execution starts "
            f"{constraints.processes} ({counted(constraints.nodes, 'node')} × {constraints.processes_per_node}); "
            f"{_with_processes(layout, constraints)}"
        )


def _with_processes(layout: Layout, constraints: RunConstraints) -> str:
    """Return what to change so that a layout has as many processes as are started."""
    others = layout.world_size // layout.dp_shard
    if constraints.processes % others == 0:
        return f"`dp_shard: {constraints.processes // others}` makes as many"
    return f"{others} × any dp_shard is none: change a degree, or `execution.processes`"


def _batch(layout: Layout, constraints: RunConstraints) -> Iterator[str]:
    rows = layout.micro_batch_size * layout.data_parallel_size
    if constraints.global_batch_size % rows:
        yield (
            f"global_batch_size {constraints.global_batch_size} is not divisible by micro_batch_size "
            f"{layout.micro_batch_size} × dp_replicate {layout.dp_replicate} × dp_shard {layout.dp_shard} = {rows}; "
            f"the nearest that is: {max(1, round(constraints.global_batch_size / rows)) * rows}"
        )
