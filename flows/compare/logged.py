"""Comparison rows made from runs that MLflow already has, if they differ in nothing but their layouts. Does no I/O.

Runs that differ in hardware, in the version of the code or in the work itself would compare those instead, so they are
refused, with their differences, unless mixing is requested.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from flows.compare.layouts import BATCH_FIELD
from flows.report.layouts import Row, first_line, with_differences
from flows.tracking.logged_runs import LoggedRun
from flows.tracking.rows import COMPARISON_IDENTITY
from stages.core.errors import RecipeError
from stages.parallel.layout import Layout

HARDWARE = "hardware"
"""MLflow tag that names the machine of a run, such as `8 × NVIDIA H100 80GB HBM3`."""
GIT_COMMIT = "git_commit"
EQUAL_TAGS = (HARDWARE, GIT_COMMIT, "upstream.model", "upstream.data.dataset")
SAME_WORK_PARAMS = ("method", "precision", "data.sequence_length", "data.packing")
DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp")
SHOWN_VALUES = 4
RELATIVE = ("relative_tokens_per_s", "loss_difference")


def rows_of_runs(runs: Sequence[LoggedRun], *, allow_mixed: bool) -> list[Row]:
    """Return a comparison row for each run of a train stage that has a layout, and metrics or an error.

    Mixed runs are grouped by refresh, stage and method, which their rows name; differences are within a group. Raises
    RecipeError when there is none, or when the runs differ in more than layouts and `allow_mixed` is not set.
    """
    chosen = [run for run in runs if _is_training(run)]
    if not chosen:
        raise RecipeError(f"none of the {len(runs)} runs found is a finished or failed run of a train stage")
    facts = {name: Counter(run.tags.get(name, "unknown") for run in chosen) for name in EQUAL_TAGS}
    facts |= {name: Counter(run.params.get(name, "unknown") for run in chosen) for name in SAME_WORK_PARAMS}
    differing = {name: values for name, values in facts.items() if len(values) > 1}
    if differing and not allow_mixed:
        shown = "\n".join(f"  {name}: {_listed(values)}" for name, values in differing.items())
        raise RecipeError(
            f"the {len(chosen)} runs found differ in more than their layouts:\n{shown}\n"
            "narrow them down, such as --where \"tags.hardware = '…'\", or add --allow-mixed"
        )
    names_batch = len({run.params[BATCH_FIELD] for run in chosen}) > 1
    groups: dict[str, list[LoggedRun]] = {}
    for run in sorted(chosen, key=_place):
        groups.setdefault(_work(run) if differing else "", []).append(run)
    rows = []
    for work, members in groups.items():
        shown = f"{work}: " if len(groups) > 1 else ""
        rows += with_differences([_row(run, shown, names_batch) for run in members])
    return rows


def _is_training(run: LoggedRun) -> bool:
    measured = run.status == "FINISHED" and "step_time_s" in run.metrics
    return "engine" in run.params and "layout.dp_shard" in run.params and (measured or run.status == "FAILED")


def _listed(values: Mapping[str, int]) -> str:
    shown = [f"{value} ({count} runs)" for value, count in list(values.items())[:SHOWN_VALUES]]
    return ", ".join(shown) + (f" and {len(values) - SHOWN_VALUES} more" if len(values) > SHOWN_VALUES else "")


def _work(run: LoggedRun) -> str:
    """Return a text `REFRESH STAGE METHOD` that names what a run trained, as far as each of the three is known."""
    refresh = run.tags.get("refresh") or run.tags.get("comparison")
    return " ".join(filter(None, [refresh, run.tags.get("stage"), run.params.get("method")]))


def _place(run: LoggedRun) -> tuple[str, int]:
    """Return the key by which compared runs are sorted. Runs of a comparison come last, in the order of its layouts."""
    comparison, _, number = run.tags.get(COMPARISON_IDENTITY, "").partition("/")
    return comparison, int(number or 0)


def _row(run: LoggedRun, work: str, names_batch: bool) -> Row:
    layout = {name: run.params[f"layout.{name}"] for name in Layout.model_fields if f"layout.{name}" in run.params}
    default = Layout().model_dump(mode="json")
    fields = " ".join(f"{name}={value}" for name, value in layout.items() if value != str(default[name]))
    batch = f" {BATCH_FIELD}={run.params[BATCH_FIELD]}" if names_batch else ""
    failed = run.status == "FAILED"
    return Row(
        text=f"{work}{run.params['engine']} {fields}".strip() + batch,
        engine=run.params["engine"],
        num_devices=Layout(**{name: int(layout.get(name, "1")) for name in DEGREES}).world_size,
        global_batch_size=int(run.params[BATCH_FIELD]),
        params=run.params,
        metrics={} if failed else {name: value for name, value in run.metrics.items() if name not in RELATIVE},
        error=first_line(run.tags.get("error", "failed")) if failed else None,
        run_id=run.run_id,
    )
