"""The Prefect flow of a comparison: a refresh of what the stage stands on, then a task a trial, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from prefect import flow, runtime, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Completed, Failed

from flows.compare.figures import rows_of
from flows.compare.record import ComparisonRecord
from flows.compare.run import ComparisonRequest, ComparisonRun, plan_comparison
from flows.compare.table import cells
from flows.ledger.refreshes import new_refresh_id
from flows.running.refresh import flow_of, stopped_by_signals
from flows.running.refresh_run import RefreshRun
from flows.servers.local import answers

OPENED_COMPARISON: ContextVar[ComparisonRun] = ContextVar("opened_comparison")
"""A comparison that the caller in this process has planned already (the CLI, before it starts servers)."""


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="{name}", retries=0)
def measure(trial: Callable[[], None], name: str) -> None:
    """Run one layout for one round; that a layout fails is a result too."""
    trial()


@flow(name="compare", flow_run_name=lambda: _flow_run_name(), persist_result=False, retries=0)
def compare(
    recipe: str,
    stage: str,
    layouts: tuple[str, ...],
    overrides: tuple[str, ...] = (),
    steps: int = 20,
    warmup: int = 5,
    rounds: int = 2,
    comparison_id: str | None = None,
) -> State[Any]:
    """Compare layouts of a train stage. `comparison_id` is the name of the record, and of the flow run."""
    run = OPENED_COMPARISON.get(None)
    if run is None:
        request = ComparisonRequest(recipe, stage, layouts, overrides, steps, warmup, rounds)
        run = ComparisonRun(plan_comparison(request), runtime.flow_run.name)
    run.begin(str(runtime.flow_run.id))
    try:
        build_upstream(run)
        with stopped_by_signals(run.stop):
            run.run(measure)
    except BaseException as error:
        record = run.finish(error)
        if not isinstance(error, Exception):
            raise
    else:
        record = run.finish(None)
    if answers(f"{PREFECT_API_URL.value()}/health"):
        table = cells(rows_of(record))
        create_table_artifact(key="layouts", table=table, description=f"Layouts of {stage}, {record.comparison}")
    return _final_state(record)


def build_upstream(run: ComparisonRun) -> None:
    """Build what is not there yet, as a refresh of its own. Raises what kept a stage of it from being built."""
    planned = run.planned.upstream_refresh
    if planned is None:
        return
    upstream = run.upstream or RefreshRun(planned)
    named = flow_of(upstream).with_options(flow_run_name=upstream.record.refresh)
    named(planned.request.recipe, planned.request.overrides, return_state=True)
    for error in upstream.errors.values():
        raise error


def _flow_run_name() -> str:
    parameters = runtime.flow_run.parameters
    return parameters.get("comparison_id") or new_refresh_id(f"{Path(parameters['recipe']).stem}-compare")


def _final_state(record: ComparisonRecord) -> State[Any]:
    if record.state == "completed":
        return Completed(message=f"{len(record.layouts)} layouts in {record.seconds:.1f} s")
    if record.state == "cancelled":
        return Cancelled(message=record.error)
    return Failed(message=record.error)
