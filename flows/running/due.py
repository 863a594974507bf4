"""Start of a refresh that Prefect triggers, by schedule or by hand: it starts at once, waits, or is left out.

Running refreshes are found in the ledgers, each of which names a process; dead ones do not count. Prefect's own
concurrency slots were measured and dropped, see `slots.py`.
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from filelock import FileLock
from prefect import get_run_logger, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId, FlowRunFilterExpectedStartTime
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events import Event
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled

from flows.ledger.home import home
from flows.ledger.machine import num_slots
from flows.ledger.refreshes import RunningRefreshes, ledger_of
from flows.planning.devices import wanted_slots
from flows.planning.plan import Plan
from flows.recipe.recipe import Recipe, load_recipe
from flows.running.parameters import check_parameters, check_recipe
from flows.running.refresh_run import RefreshRun
from flows.running.request import RefreshRequest, make_plan, retry_of
from flows.running.slots import Slots

POLL_S = 2.0
REMOVED = "its schedule was removed before it began"
"""Message of a flow run cancelled because its schedule was removed. The state `Removed` sends no notification."""


def announce_own_schedule() -> None:
    """Send Prefect the event that this process's flow run was scheduled, at its first start only.

    For a flow run whose process died before, the reaper does it.
    """
    with get_client(sync_client=True) as client:
        own = client.read_flow_run(UUID(str(runtime.flow_run.id)))
        if own.run_count == 1:
            announce_schedule(client, own)


def announce_own_states() -> None:
    """Send Prefect the events of all states of this process's flow run again, so that automations react to them."""
    with get_client(sync_client=True) as client:
        own = client.read_flow_run(UUID(str(runtime.flow_run.id)))
        announce_states(client, own, client.read_flow_run_states(own.id))


def announce_schedule(client: SyncPrefectClient, flow_run: FlowRun) -> None:
    """Send the event of a scheduled run's first state to Prefect, whose scheduler omits it. See `announce_states`."""
    if flow_run.auto_scheduled:
        first = min(client.read_flow_run_states(flow_run.id), key=lambda state: state.timestamp)
        announce_states(client, flow_run, [first])


def announce_states(client: SyncPrefectClient, flow_run: FlowRun, states: Iterable[State[Any]]) -> None:
    """Send Prefect events for states of a flow run, as its server does itself, so that automations react to them.

    A repeated event does no harm. Prefect holds a run's event back (this project's server for a minute, others for 15)
    until that of the state before has come, if that is less than 5 minutes old, and with it the notification of how the
    run ended. It keeps what came in memory: a restarted server waits for an event that came before. Raises what the
    client raises when the server does not answer.
    """
    flow = client.read_flow(flow_run.flow_id)
    # By these an automation knows which flow runs it is for.
    related = [_resource("flow", flow.id, flow.name)]
    if deployment := _deployment_of(client, flow_run):
        related.append(_resource("deployment", deployment.id, deployment.name))
    events = [
        Event(
            event=f"prefect.flow-run.{state.name}",
            resource={"prefect.resource.id": f"prefect.flow-run.{flow_run.id}", "prefect.state-name": state.name or ""},
            related=related,
            # The state's own number and time: an automation that has reacted to this state does not do so again.
            id=state.id,
            occurred=state.timestamp,
        )
        for state in states
    ]
    # Not by `emit_event`: its thread sends old events again whenever the server was restarted, to automations that no
    # longer know that they have reacted to them.
    client.request("POST", "/events", json=[event.model_dump(mode="json") for event in events])


def _resource(role: str, number: UUID, name: str) -> dict[str, str]:
    return {
        "prefect.resource.id": f"prefect.{role}.{number}",
        "prefect.resource.role": role,
        "prefect.resource.name": name,
    }


def start_when_due(request: RefreshRequest) -> RefreshRun | State[Any]:
    """Start this flow run's refresh once the recipe's `on_collision` allows it, or return a state with the reason.

    A retry continues in the ledger of the refresh that failed. All that the recipe depends on is resolved at its start.
    Raises what `check_recipe`, `check_parameters` and `make_plan` raise.
    """
    # The last part only, so that a name from Prefect cannot lead to another folder.
    name = Path(str(runtime.flow_run.name)).name
    ledger = ledger_of(name)
    if ledger.exists():
        request = retry_of(ledger.read())
    else:
        _check_deployment(request.recipe)
        check_parameters(request)
    recipe = load_recipe(Path(request.recipe), request.overrides)
    running = RunningRefreshes()
    waited = False
    while not (run := _try_to_start(request, recipe, running, name)):
        if not waited:
            get_run_logger().info(f"waiting: another refresh of {recipe.name} is running")
            waited = True
        time.sleep(POLL_S)
    return run


def _check_deployment(recipe: str) -> None:
    """Check that this flow run's deployment may run the recipe. Raises what `check_recipe` raises."""
    with get_client(sync_client=True) as client:
        if deployment := _deployment_of(client, client.read_flow_run(UUID(str(runtime.flow_run.id)))):
            check_recipe(recipe, deployment.name, deployment.parameters.get("recipe"))


def _deployment_of(client: SyncPrefectClient, flow_run: FlowRun) -> DeploymentResponse | None:
    """Return the Prefect deployment of a flow run; None if it has none, or if it was removed with its schedule."""
    with suppress(ObjectNotFound):
        return client.read_deployment(flow_run.deployment_id) if flow_run.deployment_id else None
    return None


def _try_to_start(
    request: RefreshRequest, recipe: Recipe, running: RunningRefreshes, name: str
) -> RefreshRun | State[Any] | None:
    """Start a refresh that is due; return None while it must wait, or a state that says why it is left out.

    Planning takes a while, so it is done outside the lock, and running refreshes are looked up twice.
    """
    if reason := _not_wanted():
        return reason
    if not running.of(recipe.name):
        planned = make_plan(request)
        if recipe.on_collision == "skip" and (busy := _busy(planned.plan)):
            return Cancelled(name="Skipped", message=busy)
        with FileLock(home() / "start.lock", fallback_to_soft=False):  # two may find at once that no other runs
            if not running.of(recipe.name):
                return RefreshRun(planned, name)
    if recipe.on_collision == "skip":
        return Cancelled(name="Skipped", message=f"{running.of(recipe.name)[0].refresh} is still running")
    return None


def _not_wanted() -> State[Any] | None:
    """Return a Prefect state with the reason why this scheduled run is left out; None if it should run.

    Of missed runs only the last one runs, none of a paused or removed schedule, but always a person's run or retry.
    """
    with get_client(sync_client=True) as client:
        own = client.read_flow_run(UUID(str(runtime.flow_run.id)))
        if not own.auto_scheduled or own.run_count > 1 or own.deployment_id is None:
            return None
        # A worker may have taken it just before the schedule was paused or removed, when Prefect no longer removes it.
        deployment = _deployment_of(client, own)
        if deployment is None:
            return Cancelled(name="Removed", message=REMOVED)
        if deployment.paused:
            return Cancelled(name="Skipped", message="its schedule was paused before it began")
        due = FlowRunFilterExpectedStartTime(after_=own.expected_start_time, before_=datetime.now(UTC))
        schedule = FlowRunFilterDeploymentId(any_=[own.deployment_id])
        runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(deployment_id=schedule, expected_start_time=due))
    # The filter's bounds include this run itself.
    newer = next((run for run in runs if run.id != own.id and run.auto_scheduled), None)
    if newer:
        return Cancelled(name="Superseded", message=f"{newer.name}, of the same schedule, was due later")
    return None


def _busy(plan: Plan) -> str | None:
    """Return why a refresh would have to wait for machine slots that others hold, or None if enough are free."""
    slots = Slots(home() / "slots", num_slots())
    wanted = {
        stage.name: wanted_slots(stage.config, slots.count) for stage in plan.stages.values() if stage.action == "run"
    }
    free = slots.num_free()
    short = [f"{name} needs {number}" for name, number in wanted.items() if number > free]
    return f"of {slots.count} slots {free} are free, {short[0]}; another refresh holds the rest" if short else None
