"""Prefect flow of a refresh, with one task for each stage that runs once its upstream stages are done.

Only our store decides what is cached, so Prefect's own caching is off; `retries.py` decides what Prefect retries.
"""

import functools
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from prefect import Flow, allow_failure, flow, get_run_logger, runtime, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.exceptions import ObjectNotFound
from prefect.futures import PrefectFuture
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.tasks import exponential_backoff

from flows.ledger.record import RefreshRecord
from flows.ledger.refreshes import ledger_of, new_refresh_id
from flows.recipe.recipe import load_recipe
from flows.report.layouts import cells, rows_of
from flows.running.comparison import LayoutComparison, turns
from flows.running.due import announce_own_schedule, announce_own_states, start_when_due
from flows.running.outcome import summary, verdict_tables
from flows.running.refresh_run import RefreshRun
from flows.running.request import RefreshRequest
from flows.servers.local import is_answering
from flows.tracking.pages import page_of, report_page_of, run_page_of
from flows.tracking.rows import scores_text
from stages.core.approval import AWAITED, PROMOTED, REFUSED
from stages.core.errors import LifecycleError, RefreshStoppedError
from stages.core.garbage import collect_rarely

RETRY_BASE_S = 1.0
COMPARE = "compare"
"""Name of Prefect's flow for layout comparisons, by which notifications for refreshes leave comparisons out."""
REFUSED_NOW, REFUSED_BEFORE, WAITING = "NotPromoted", "StillNotPromoted", "WaitingForApproval"
"""Names of Prefect states in which a promotion, and the refresh with it, may end."""


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="{name}")
def build_stage(name: str, run: RefreshRun) -> State[Any]:
    """Run one stage as a Prefect task, or find its artifact.

    A promotion that refuses, or that a person has yet to approve, ends as a cancelled task.
    """
    try:
        built = run.build(name, runtime.task_run.run_count, get_run_logger())
    except RefreshStoppedError as error:
        return Cancelled(message=str(error))
    where = f"{built.kind} {built.version} in {built.artifact}"
    verdict = run.record.stages[name].verdict
    if verdict == AWAITED:
        return Cancelled(name=WAITING, message=where)
    if verdict == REFUSED:
        return Cancelled(name=REFUSED_NOW if built.state == "built" else REFUSED_BEFORE, message=where)
    return Completed(name="Cached" if built.state == "cached" else "Completed", message=where)


@task(cache_policy=NO_CACHE, persist_result=False, retries=0, task_run_name="check of inputs")
def check_inputs(run: RefreshRun) -> None:
    """Check the inputs of all stages (data, splits, tasks, chat templates) before any stage trains."""
    run.check_inputs(get_run_logger())


@task(cache_policy=NO_CACHE, persist_result=False, retries=0)
def run_layout(run: RefreshRun, layout: int, round_number: int, devices: list[int]) -> None:
    """Run one trial of a layout comparison as a Prefect task: some training steps under one layout."""
    run.measure(layout, round_number, devices)


@flow(name="refresh", flow_run_name=lambda: _flow_run_name(), persist_result=False, retries=0)
def refresh(
    recipe: str,
    overrides: tuple[str, ...] = (),
    until: str | None = None,
    force: tuple[str, ...] = (),
) -> State[Any]:
    """Refresh a model by running the stages of a recipe; stages whose artifacts exist already are not run again.

    Args:
        recipe: Path of the recipe file, on the machine that runs the refresh.
        overrides: Changes to the recipe, such as stages.sft.learning_rate=1e-4.
        until: Run only this stage and the stages that it depends on.
        force: Stages to run although their artifacts exist.
    """
    announce_own_schedule()
    try:
        due = start_when_due(RefreshRequest(recipe, overrides, until, force))
    except LifecycleError as error:
        return Failed(message=f"{type(error).__name__}: {error}")
    if not isinstance(due, RefreshRun):
        return announce(str(runtime.flow_run.id), due)
    due.tracker.start({})
    return _run(due)


def flow_of(run: RefreshRun) -> Flow[..., State[Any]]:
    """Return the Prefect flow that runs an already planned refresh, with the same parameters as the flow `refresh`."""

    @functools.wraps(refresh.fn)
    def planned(*_: object, **__: object) -> State[Any]:
        return _run(run)

    name = COMPARE if run.comparison else refresh.name
    return Flow(planned, name=name, flow_run_name=run.record.refresh, persist_result=False, retries=0)


def _run(run: RefreshRun) -> State[Any]:
    collect_rarely()
    # Servers of this refresh and their clients share one key; it is in no argument and in no file.
    os.environ.setdefault("VLLM_API_KEY", secrets.token_urlsafe(32))
    run.begin(str(runtime.flow_run.id), runtime.flow_run.run_count)
    try:
        with stopped_by_signals(run.stop):
            if run.comparison and any(stage.action == "run" for stage in run.plan.stages.values()):
                run.tracker.start({})
            _run_stages(run)
            if run.comparison and not run.errors:
                run.tracker.close()  # the shipper would use a core during the measurements
                _measure(run, run.comparison)
    finally:
        record = run.finish()
    state = final_state(record)
    # Each request to a server that is away would be repeated for seconds, and hold up the end.
    if is_answering(f"{PREFECT_API_URL.value()}/health"):
        _publish(record)
        announce_own_states()  # a server that was started again meanwhile has forgotten them
        announce(str(runtime.flow_run.id), state)
    return state


def _flow_run_name() -> str:
    """Return the name of this flow run and its refresh. A retry keeps it, and so continues the same ledger."""
    name, parameters = str(runtime.flow_run.name), runtime.flow_run.parameters
    if ledger_of(name).exists():
        return name
    path = Path(parameters["recipe"])
    try:
        return new_refresh_id(load_recipe(path, parameters["overrides"]).name)
    except LifecycleError:  # the flow reports the problem
        return new_refresh_id(path.stem)


def _run_stages(run: RefreshRun) -> None:
    """Run every stage as soon as its upstream stages are done; a failed stage stops only its dependents.

    Inputs are checked between downloads and all other stages, so that none trains for a stage that cannot work.
    """
    # One thread for each stage and one for the check: a stage that waits for slots keeps its thread.
    with ThreadPoolTaskRunner(max_workers=len(run.plan.stages) + 1) as runner:
        futures: dict[str, PrefectFuture[Any]] = {}

        def submit(name: str, wait_for: list[Any]) -> None:
            build = build_stage.with_options(
                retries=run.plan.stages[name].config.execution.retries,
                retry_delay_seconds=exponential_backoff(RETRY_BASE_S),
                retry_condition_fn=lambda *_: run.retries.is_due(name),
            )
            futures[name] = runner.submit(build, {"name": name, "run": run}, wait_for=wait_for)

        stages = run.plan.stages
        # Downloads begin at once; the check waits for them, and all other stages for the check.
        for name in (name for name, stage in stages.items() if not stage.upstream):
            submit(name, [])
        checked = []
        if run.has_inputs_to_check:
            # After a failed download, the other inputs are checked all the same.
            downloads = [allow_failure(future) for future in futures.values()]
            checked = [runner.submit(check_inputs, {"run": run}, wait_for=downloads)]
        behind_verdicts = [
            name
            for name, stage in stages.items()
            if any(stages[other].config.product == "verdict" for other in stage.upstream)
        ]
        for name in (name for name, stage in stages.items() if stage.upstream and name not in behind_verdicts):
            submit(name, [*checked, *(futures[other] for other in stages[name].upstream)])
        for name in behind_verdicts:
            # A refusal has the state of a cancelled task, after which Prefect would not start dependents.
            upstream = stages[name].upstream
            for other in upstream:
                futures[other].wait()
            is_decided = all(run.record.stages[other].verdict != AWAITED for other in upstream)
            if is_decided and run.built.keys() >= set(upstream):
                submit(name, checked)
        for future in (*checked, *futures.values()):
            future.wait()
        _end_skipped(futures)


def _end_skipped(futures: Mapping[str, PrefectFuture[Any]]) -> None:
    """Set the state `Skipped` for task runs that never began because an upstream stage failed.

    Prefect leaves them `NotReady`, which is no final state, and draws them as running, without their stages' names.
    """
    skipped = {name: future.task_run_id for name, future in futures.items() if not future.state.is_final()}
    if not skipped:
        return
    ended = Cancelled(name="Skipped", message="a stage that it stands on was not built")
    # Only Prefect's display depends on it, so a server that is away is no failure here.
    with suppress(httpx.HTTPError, ObjectNotFound), get_client(sync_client=True) as client:
        for name, task_run in skipped.items():
            client.set_task_run_name(task_run, name)
            client.set_task_run_state(task_run, ended, force=True)


def _measure(run: RefreshRun, comparison: LayoutComparison) -> None:
    """Run a comparison's trials as Prefect tasks, one by one, until stopped. A layout that fails is a result too."""
    with suppress(RefreshStoppedError), run.whole_machine() as devices:
        for round_number, layout in turns(len(comparison.layouts), comparison.began.num_rounds):
            name = f"round {round_number}: {comparison.began.layouts[layout].text}"
            run_layout.with_options(task_run_name=name)(run, layout, round_number, devices, return_state=True)
            if run.errors:
                return


@contextmanager
def stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """Make SIGINT and SIGTERM stop the running stages instead of this process, which can then end the refresh properly.

    Only in the main thread; elsewhere the program that runs the flow decides.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Restored at the end, since the program that runs the flow has handlers of its own.
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: stop.set()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _publish(record: RefreshRecord) -> None:
    """Write tables of stages, promotions and layouts, and links, to the flow run's page in Prefect."""
    rows = [
        {
            "stage": name,
            "kind": entry.kind,
            "version": entry.version,
            "state": entry.state,
            "seconds": entry.seconds,
            "scores": scores_text(entry.kind, entry.metrics),
            "MLflow": run_page_of(entry.attempt) or "",
            "artifact": str(entry.artifact or ""),
        }
        for name, entry in record.stages.items()
    ]
    create_table_artifact(key="stages", table=rows, description=f"Stages of {record.refresh}")
    for name, table in verdict_tables(record).items():
        create_markdown_artifact(key=f"verdict-{name.replace('_', '-')}", markdown=table)
    if record.comparison:
        description = f"Layouts of {record.comparison.stage}, {record.refresh}"
        create_table_artifact(key="layouts", table=cells(rows_of(record)), description=description)
    if mlflow_page := page_of(record.refresh):
        create_link_artifact(key="mlflow", link=mlflow_page, link_text=f"{record.refresh} in MLflow")
    if report := report_page_of(record.refresh):
        create_link_artifact(key="report", link=report, link_text=f"report of {record.refresh}")


def final_state(record: RefreshRecord) -> State[Any]:
    """Return the Prefect state in which a refresh ends, such as `Promoted`. Prefect automations react to its name.

    A refusal is no failure to fix, but must not look like success: its type is that of a cancelled run, as for a
    scheduled run that was left out. Prefect's pages colour by type.
    """
    verdicts = {entry.verdict for entry in record.stages.values() if entry.state == "built"}
    if record.state == "not_promoted":
        # Notifications of a cached verdict went out when it was given.
        return Cancelled(name=REFUSED_NOW if REFUSED in verdicts else REFUSED_BEFORE, message=summary(record))
    if record.state == "waiting_for_approval":
        return Cancelled(name=WAITING, message=summary(record))
    if record.state == "completed" and PROMOTED in verdicts:
        return Completed(name="Promoted", message=summary(record))
    if record.state == "completed" and record.comparison:
        return Completed(message=f"{len(record.comparison.layouts)} layouts in {record.seconds:.1f} s")
    if record.nothing_new:
        return Completed(name="Cached", message=f"nothing new: {len(record.stages)} stages cached")
    if record.state == "completed":
        return Completed(message=f"{len(record.stages)} stages in {record.seconds:.1f} s")
    if record.state == "cancelled":
        return Cancelled(message=record.error)
    return Failed(message=summary(record))


def announce(flow_run: str, state: State[Any]) -> State[Any]:
    """Emit a Prefect event named by the state's type, such as `Cancelled`, and return the state.

    Prefect names the event of a state after the state. Automations that wait for the end of a run, such as the one that
    its manual recommends against zombies, know only types, and would end a promoted run as crashed.
    """
    plain = state.type.value.title()
    if state.name != plain:
        emit_event(f"prefect.flow-run.{plain}", resource={"prefect.resource.id": f"prefect.flow-run.{flow_run}"})
    return state
