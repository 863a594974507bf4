"""Commands that refresh recipes at fixed times: `lifecycle schedule`, `schedules`."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from flows.cli.answers import JSON_OPTION, SET_OPTION, print_json, warn_of_missing_worker

NAME = click.argument("name", metavar="RECIPE_NAME")


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--cron",
    required=True,
    metavar="EXPRESSION",
    help='Times in cron syntax, such as "0 3 * * *" for every night at three.',
)
@click.option(
    "--timezone", default="UTC", show_default=True, help="Time zone of the cron expression, such as Europe/Berlin."
)
@SET_OPTION
@JSON_OPTION
def schedule(recipe: Path, cron: str, timezone: str, overrides: Sequence[str], as_json: bool) -> None:
    """Schedule a recipe at fixed times, and start the worker that runs it. A recipe has one schedule."""
    from flows.service import schedule as plans

    spec = plans.schedule_spec(recipe, cron, timezone, tuple(overrides))  # before servers are started for it
    _reach_servers(worker=True)
    _show([plans.schedule(spec)], as_json)


@click.group(invoke_without_command=True)
@JSON_OPTION
@click.pass_context
def schedules(context: click.Context, as_json: bool) -> None:
    """List, pause, resume and remove schedules; without a subcommand, list them."""
    if context.invoked_subcommand is None:
        _list(as_json)


@schedules.command("list")
@JSON_OPTION
def list_schedules(as_json: bool) -> None:
    """List the schedules, each with the time of its next refresh."""
    _list(as_json)


@schedules.command()
@NAME
@JSON_OPTION
def pause(name: str, as_json: bool) -> None:
    """Pause a schedule: keep it, but run nothing until it is resumed."""
    _reach_servers()
    from flows.service import schedule as plans

    _show([plans.pause(name)], as_json)


@schedules.command()
@NAME
@JSON_OPTION
def resume(name: str, as_json: bool) -> None:
    """Resume a paused schedule; refreshes missed during the pause are not made up for."""
    _reach_servers()
    from flows.service import schedule as plans

    _show([plans.resume(name)], as_json)


@schedules.command()
@NAME
@JSON_OPTION
def remove(name: str, as_json: bool) -> None:
    """Remove a schedule. A refresh that it has started goes on."""
    _reach_servers()
    from flows.service import schedule as plans

    plans.remove(name)
    print_json({"removed": name}) if as_json else click.echo(f"{name} is no longer scheduled")


def _list(as_json: bool) -> None:
    _reach_servers()
    from flows.service import schedule as plans

    _show(plans.schedules(), as_json)
    warn_of_missing_worker()


def _reach_servers(*, worker: bool = False) -> None:
    """Start the local servers if needed, and set the address of Prefect's server."""
    from flows.cli import run_command

    run_command.ready_servers(worker=worker)


def _show(schedules: Sequence[Any], as_json: bool) -> None:
    if as_json:
        print_json({"schedules": [{**asdict(item), "next_due": _time(item, "seconds")} for item in schedules]})
        return
    for item in schedules:
        due = "paused" if item.paused else f"next {_time(item, 'minutes') or 'not known yet'}"
        overrides = f"  {' '.join(item.overrides)}" if item.overrides else ""
        click.echo(f"{item.name:<20} {item.cron:<14} {item.timezone:<16} {due:<28} {item.recipe}{overrides}")
    if not schedules:
        click.echo('nothing is scheduled; `lifecycle schedule RECIPE --cron "0 3 * * *"` does it')


def _time(item: Any, precision: str) -> str | None:
    """Return the time of a schedule's next refresh, in the schedule's time zone; None when unknown."""
    from zoneinfo import ZoneInfo

    return item.next_due.astimezone(ZoneInfo(item.timezone)).isoformat(" ", precision) if item.next_due else None
