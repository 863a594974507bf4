"""Checks whether a layout works for a number of processes, a batch size and a model; needs no torch.

Each error is a sentence with every factor in it, made lazily: a search calls `is_legal` for 100,000 layouts. A config
is checked when it is parsed, and once more when its model is there. All that refuse a layout ask `refusals`.
"""

import json
import math
from collections.abc import Iterator, Mapping
from itertools import combinations, product
from typing import Any

from stages.core.lines import counted
from stages.models.shape import ModelShape
from stages.parallel.engines.registry import RULES, lacked_feature, needs_other_engine
from stages.parallel.engines.rules import APART, Feature, Features
from stages.parallel.layout import EngineName, Layout, RunConstraints

DEFAULT = Layout()
FACTORS = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
"""Names of the parallel degrees whose product is the number of processes."""
LOWERED = ("dp_replicate", "tp", "pp", "cp", "vpp", "ep", "etp", "micro_batch_size")
"""Names of the fields that the nearest layout may have lower; `dp_shard` makes up for them."""
CHOICES = ("recompute", "cpu_offload", "compile", "accumulate", "reshard_after_forward", "prefetch_layers")
"""Names of the fields that the nearest layout may have with their default instead."""

MOST_PROCESSES, MOST_TRIED, MOST_CHANGED = 2**17, 12, 4
"""Bounds of the look for the nearest layout: number of processes, values of a degree, and fields that are changed."""


def layout_errors(engine: EngineName, layout: Layout, constraints: RunConstraints, features: Features) -> Iterator[str]:
    """Yield an error for each reason why the engine cannot run a layout, whatever the model.

    features: those that the training uses beside its layout.
    """
    yield from _other_engines_fields(engine, layout)
    of_layout = layout_features(layout)
    yield from (error for feature, option in of_layout.items() for error in lacked_feature(engine, feature, option))
    yield from _apart(engine, of_layout, {**features, **of_layout})
    yield from _processes(engine, layout, constraints)
    yield from _batch(layout, constraints)
    yield from RULES[engine].layout_errors(layout, constraints)


def feature_errors(engine: EngineName, features: Features) -> Iterator[str]:
    """Yield an error for each feature that the engine lacks, and for those that do not go with others."""
    yield from (error for feature, option in features.items() for error in lacked_feature(engine, feature, option))
    yield from (f"{error}; change either" for error in _apart(engine, features, features))


def adapter_errors(engine: EngineName, options: Mapping[str, object]) -> Iterator[str]:
    """Yield an error for each of an adapter's options that the engine does not support. options: those in use."""
    for name, value in options.items():
        if not RULES[engine].supports_adapter_option(name):
            supporting = (other for other, rules in RULES.items() if rules.supports_adapter_option(name))
            yield needs_other_engine(f"`adapter.{name}: {json.dumps(value)}`", engine, " or ".join(supporting))


def is_legal(
    engine: EngineName, layout: Layout, constraints: RunConstraints, shape: ModelShape | None, features: Features
) -> bool:
    """Return whether a parallel layout works for this run and model; the check stops at the first error."""
    if any(layout_errors(engine, layout, constraints, features)):
        return False
    return shape is None or not any(RULES[engine].model_errors(layout, shape))


def refusals(
    engine: EngineName,
    layout: Layout,
    constraints: RunConstraints,
    features: Features,
    shape: ModelShape | None = None,
) -> list[str]:
    """Return an error for each reason why a layout does not work, and last the nearest that does; [] if it works.

    shape: the model's; None: only what concerns any model is checked. Of one that no layout suits the errors alone.
    """
    of_model = [*RULES[engine].model_errors(layout, shape)] if shape else []
    errors = [*layout_errors(engine, layout, constraints, features), *of_model]
    if not errors or (shape and {*of_model} & {*RULES[engine].model_errors(DEFAULT, shape)}):
        return errors
    nearest = nearest_layout(engine, layout, constraints, features, shape)
    if nearest is None:
        return [
            *errors,
            f"no smaller degrees make {constraints.processes} processes; change their number, or the batch",
        ]
    changed = [f"`{name}: {json.dumps(value)}`" for name, value in nearest if value != getattr(layout, name)]
    return [*errors, f"set {' and '.join(changed)}, the nearest layout that works"]


def nearest_layout(
    engine: EngineName, layout: Layout, constraints: RunConstraints, features: Features, shape: ModelShape | None
) -> Layout | None:
    """Return the legal layout of as many processes that differs in fewest fields, and least in degrees; or None."""
    processes, others = constraints.processes, dict[str, list[Any]]()
    for name in LOWERED:
        degree: int = getattr(layout, name)
        # All but these two are of processes, and divide their number.
        whole = min(degree, MOST_PROCESSES) if name in ("micro_batch_size", "vpp") else processes
        lower = [one for one in range(min(degree - 1, MOST_PROCESSES), 0, -1) if whole % one == 0]
        others[name] = [*lower[:MOST_TRIED], *lower[MOST_TRIED:][-1:]]
    for name in CHOICES:
        others[name] = [] if getattr(layout, name) == getattr(DEFAULT, name) else [getattr(DEFAULT, name)]
    others["sequence_parallel"] = [not layout.sequence_parallel]

    def distance(changed: dict[str, Any]) -> float:
        return sum(math.log(getattr(layout, name) / one) for name, one in changed.items() if name in LOWERED)

    for number in range(MOST_CHANGED + 1) if processes <= MOST_PROCESSES else ():
        tried = [
            dict(zip(names, values, strict=True))
            for names in combinations(others, number)
            for values in product(*(others[name] for name in names))
        ]
        for changed in sorted(tried, key=distance):
            near = layout.model_copy(update={**changed, "dp_shard": 1})
            near = near.model_copy(update={"dp_shard": max(1, processes // near.world_size)})
            if is_legal(engine, near, constraints, shape, features):
                return near
    return None


def layout_features(layout: Layout) -> dict[Feature, str]:
    """Return the features that a layout uses, as a recipe asks for them."""
    used: dict[Feature, str] = {}
    for degree in ("tp", "cp", "ep"):
        if (size := getattr(layout, degree)) > 1:
            used[degree] = f"`layout.{degree}: {size}`"
    if layout.sequence_parallel and layout.tp > 1:
        used["sequence_parallel"] = "`layout.sequence_parallel`"
    if layout.compile:
        used["compile"] = "`layout.compile`"
    if layout.cpu_offload:
        used["cpu_offload"] = "`layout.cpu_offload`"
    if layout.recompute == "offload":
        used["activation_offload"] = "`layout.recompute: offload`"
    if layout.pp > 1 and layout.recomputes:
        used["recomputed_stages"] = f"`layout.recompute: {layout.recompute}` over `pp: {layout.pp}`"
    if layout.accumulate == "sharded":
        used["sharded_gradients"] = "`layout.accumulate: sharded`"
    return used


def _apart(engine: EngineName, features: Features, others: Features) -> Iterator[str]:
    """Yield an error for each feature that does not go with some of the others in use."""
    for feature, option in features.items():
        unlike = RULES[engine].apart.get(feature, {})
        if met := [one for one in unlike if one in others]:
            of_engine = f" with `engine: {engine}`" if {*met} - APART.get(feature, {}).keys() else ""
            named = ", nor with ".join(f"{others[one]}{unlike[one]}" for one in met)
            yield f"{option}{of_engine} does not go with {named}"


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
            f"{constraints.processes} ({counted(constraints.nodes, 'node')} × {constraints.processes_per_node})"
        )


def _batch(layout: Layout, constraints: RunConstraints) -> Iterator[str]:
    rows = layout.micro_batch_size * layout.data_parallel_size
    if constraints.global_batch_size % rows:
        yield (
            f"global_batch_size {constraints.global_batch_size} is not divisible by micro_batch_size "
            f"{layout.micro_batch_size} × dp_replicate {layout.dp_replicate} × dp_shard {layout.dp_shard} = {rows}; "
            f"the nearest that is: {max(1, round(constraints.global_batch_size / rows)) * rows}"
        )
