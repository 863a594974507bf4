"""Schedules of recipes: Prefect deployments of the refresh flow, which the worker runs when they are due.

A schedule has the name of its recipe. Prefect stores it; the recipe is read again at every run.
"""

import asyncio
import difflib
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from uuid import UUID
from zoneinfo import ZoneInfo, available_timezones

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas import filters
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.client.schemas.sorting import FlowRunSort
from prefect.server.schemas.schedules import CronSchedule as PlannedCron
from prefect.states import Cancelled
from pydantic import ValidationError

from flows.recipe.recipe import load_recipe
from flows.recipe.text import closest
from flows.running.due import REMOVED
from flows.running.flow_runs import deploy, find_deployment, prefect_client
from flows.running.parameters import check_parameters
from flows.running.request import RefreshRequest
from stages.core.errors import RecipeError

NUM_FIELDS = 5
RANGE = re.compile(r"(?<!\w)(\w+)-(\w+)")  # ends are numbers or names: 9-17, mon-fri
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
# Months from 0 on, since only the order of a range's ends is looked at.
NUMBERS = {name: number for number, name in enumerate(DAYS)} | {name: number for number, name in enumerate(MONTHS)}
RANDOM = re.compile(r"(^|\s)R", re.IGNORECASE)
SCHEDULE_TAG = "lifecycle-schedule"


@dataclass(frozen=True)
class Schedule:
    """Schedule of a recipe: when it is refreshed, and when next (`next_due`, None while the schedule is paused)."""

    name: str
    recipe: str
    overrides: tuple[str, ...]
    cron: str
    timezone: str
    paused: bool
    next_due: datetime | None


@dataclass(frozen=True)
class ScheduleSpec:
    """Checked settings of a recipe's schedule: overrides, cron expression and time zone."""

    name: str
    recipe: Path
    overrides: tuple[str, ...]
    when: CronSchedule


def schedule_spec(recipe: Path, cron: str, timezone: str, overrides: tuple[str, ...] = ()) -> ScheduleSpec:
    """Return a schedule's settings, checked without a server. Raises `RecipeError` for a mistake."""
    name = load_recipe(recipe, overrides).name
    check_parameters(RefreshRequest(str(recipe), overrides))
    return ScheduleSpec(name, recipe.absolute(), overrides, _cron_schedule(name, cron, timezone))


def schedule(spec: ScheduleSpec) -> Schedule:
    """Create a recipe's schedule in Prefect, replacing an earlier one; return the schedule.

    Raises `RecipeError` when another recipe of this name is scheduled, `ServerError` when Prefect does not answer.
    """
    with prefect_client() as client:
        known = find_deployment(client, spec.name)
        if known and known.parameters["recipe"] != str(spec.recipe):
            found = f"{known.parameters['recipe']} has the same name, {spec.name}, and is scheduled"
            remedy = f"give one of them another `name`, or `lifecycle schedules remove {spec.name}`"
            raise RecipeError(f"scheduling {spec.recipe}: {found}; {remedy}")
        parameters = {"recipe": str(spec.recipe), "overrides": list(spec.overrides)}
        schedules = [DeploymentScheduleCreate(schedule=spec.when, active=True)]
        deployment = deploy(client, spec.name, tags=[SCHEDULE_TAG], parameters=parameters, schedules=schedules)
        return _planned(client, deployment)


def schedules() -> list[Schedule]:
    """Return the schedules of all recipes, by name. Raises `ServerError` when Prefect does not answer."""
    with prefect_client() as client:
        tagged = filters.DeploymentFilter(tags=filters.DeploymentFilterTags(all_=[SCHEDULE_TAG]))
        deployments = client.read_deployments(deployment_filter=tagged)
        return sorted((_describe(client, one) for one in deployments), key=lambda schedule: schedule.name)


def pause(name: str) -> Schedule:
    """Pause a schedule, and delete its planned and late runs that no worker has claimed.

    A run just taken notices the pause (`flows/running/due.py`). Raises `RecipeError` when there is no such schedule.
    """
    with prefect_client() as client:
        deployment = _find_or_explain(client, name)
        client.pause_deployment(deployment.id)
        # Prefect has removed the others; these were being planned at that moment.
        for run in _runs_in(client, deployment.id, StateType.SCHEDULED):
            if run.auto_scheduled and not run.run_count:
                client.delete_flow_run(run.id)
        return _describe(client, client.read_deployment(deployment.id))


def resume(name: str) -> Schedule:
    """Resume a recipe's paused schedule. Raises `RecipeError` when there is none of this name."""
    with prefect_client() as client:
        deployment = _find_or_explain(client, name)
        client.resume_deployment(deployment.id)
        return _planned(client, deployment.id)


def remove(name: str) -> None:
    """Remove a schedule and cancel claimed, unbegun runs; running ones go on. Raises RecipeError for unknown names."""
    with prefect_client() as client:
        deployment = _find_or_explain(client, name)
        client.pause_deployment(deployment.id)  # so that no worker takes another run
        for run in _runs_in(client, deployment.id, StateType.PENDING):
            # Else it would crash: its process would look for the schedule in vain. A cancelled run does not crash.
            client.set_flow_run_state(run.id, Cancelled(name="Removed", message=REMOVED), force=True)
        client.delete_deployment(deployment.id)


def _cron_schedule(name: str, cron: str, timezone: str) -> CronSchedule:
    try:
        ZoneInfo(timezone)
    except (KeyError, ValueError, OSError) as error:
        close_names = difflib.get_close_matches(timezone, available_timezones(), n=1)
        remedy = f"expected a name such as Europe/Berlin{closest(timezone, close_names)}"
        raise RecipeError(f"scheduling {name}: there is no time zone `{timezone}`; {remedy}") from error
    expected = "expected minute, hour, day of month, month and day of week, such as `0 3 * * *`"
    # Prefect also accepts six fields (the last is the second) and R, a random time; both are refused here.
    if RANDOM.search(cron) or (len(cron.split()) != NUM_FIELDS and not cron.startswith("@")):
        raise RecipeError(f"scheduling {name}: `{cron}` is no cron expression; {expected}")
    for first, last in RANGE.findall(cron):
        if _runs_backwards(first.lower(), last.lower()):
            remedy = "expected the lower end first; write `22-23,0-4` for 22 to 4 o'clock"
            raise RecipeError(
                f"scheduling {name}: `{cron}` has the range `{first}-{last}`, which runs backwards; {remedy}"
            )
    try:
        checked = CronSchedule(cron=cron, timezone=timezone)
    except ValidationError as error:
        raise RecipeError(f"scheduling {name}: `{cron}` is no cron expression; {expected}") from error
    try:
        # As Prefect's server plans it: for 30 February the search ends with an error.
        asyncio.run(PlannedCron(cron=cron, timezone=timezone).get_dates(1))
    except ValueError as error:
        remedy = "no year has such a day; change the day of month or the month"
        raise RecipeError(f"scheduling {name}: `{cron}` is never due: {remedy}") from error
    return checked


def _runs_backwards(first: str, last: str) -> bool:
    """Return whether a range of a cron expression runs backwards, as in `1-0`, which Prefect reads as every minute."""
    numbers = [int(end) if end.isdecimal() else NUMBERS.get(end, -1) for end in (first, last)]
    if last == "sun":
        numbers[1] = 7  # Sunday is 0 and 7
    return -1 not in numbers and numbers[1] < numbers[0]


def _find_or_explain(client: SyncPrefectClient, name: str) -> DeploymentResponse:
    deployment = find_deployment(client, name)
    if deployment is None or SCHEDULE_TAG not in deployment.tags:
        tagged = filters.DeploymentFilter(tags=filters.DeploymentFilterTags(all_=[SCHEDULE_TAG]))
        known = [one.name for one in client.read_deployments(deployment_filter=tagged)]
        raise RecipeError(f"no recipe called `{name}` is scheduled{closest(name, known)}")
    return deployment


def _planned(client: SyncPrefectClient, deployment_id: UUID) -> Schedule:
    """Make Prefect plan a schedule's next runs now, without waiting for its scheduler; return the schedule."""
    client.request("POST", "/deployments/{id}/schedule", path_params={"id": deployment_id}, json={})
    return _describe(client, client.read_deployment(deployment_id))


def _runs_in(client: SyncPrefectClient, deployment_id: UUID, state: StateType) -> list[FlowRun]:
    """Return a schedule's runs in a state, earliest first. SCHEDULED: no worker has it; PENDING: it has not begun."""
    return client.read_flow_runs(
        flow_run_filter=filters.FlowRunFilter(
            deployment_id=filters.FlowRunFilterDeploymentId(any_=[deployment_id]),
            state=filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=[state])),
        ),
        sort=FlowRunSort.EXPECTED_START_TIME_ASC,
    )


def _describe(client: SyncPrefectClient, deployment: DeploymentResponse) -> Schedule:
    due = _runs_in(client, deployment.id, StateType.SCHEDULED)
    when = deployment.schedules[0].schedule
    return Schedule(
        name=deployment.name,
        recipe=deployment.parameters["recipe"],
        overrides=tuple(deployment.parameters["overrides"]),
        cron=when.cron,
        timezone=when.timezone,
        paused=deployment.paused,
        next_due=due[0].expected_start_time if due else None,
    )
