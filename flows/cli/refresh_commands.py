"""Commands about refreshes that have already started: `lifecycle retry`, `runs`, `logs`, `report`."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flows.cli.answers import JSON_OPTION, print_json, warn_of_missing_worker
from stages.core.errors import StoreError

if TYPE_CHECKING:
    from flows.ledger.record import RefreshRecord


@click.command()
@click.argument("refresh", required=False)
@JSON_OPTION
def retry(refresh: str | None, as_json: bool) -> int:
    """Continue a refresh that failed, was stopped or was killed (default: the latest) where it stopped.

    Stages that are done are reused; the one that failed continues from its last checkpoint.
    """
    from flows.cli import run_command

    return run_command.print_outcome(run_command.retry_refresh(refresh, quiet=as_json), as_json)


@click.command()
@click.option("--recipe", metavar="NAME", help="List only stage runs of this recipe.")
@click.option("--stage", metavar="NAME", help="List only runs of this stage.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Largest number of stage runs to list, newest first.",
)
@JSON_OPTION
def runs(recipe: str | None, stage: str | None, limit: int, as_json: bool) -> None:
    """List the latest runs of stages, retries included, with the outcome and the MLflow run of each."""
    from flows.cli import runs as listed

    unreadable: list[str] = []
    attempts = listed.stage_runs(recipe=recipe, stage=stage, limit=limit, unreadable=unreadable)
    print_json(listed.as_json(attempts)) if as_json else click.echo(listed.as_text(attempts))
    for sentence in listed.not_listed(unreadable):
        click.echo(sentence, err=True)
    warn_of_missing_worker()


@click.command()
@click.argument("name", metavar="STAGE|VERSION")
@click.option(
    "--refresh", metavar="ID", help="Refresh whose log is printed; default: the latest that tried to build the stage."
)
@click.option("--follow", "-f", is_flag=True, help="Follow the log until the stage has ended.")
def logs(name: str, refresh: str | None, follow: bool) -> None:
    """Print the output of all processes of a stage, from its latest run or from its artifact."""
    from flows.cli.logs import find_log

    log, is_empty = find_log(name, refresh), True
    for text in log.read(follow):
        click.echo(text, nl=False)
        is_empty = False
    if is_empty:
        click.echo(f"the processes of {name} printed nothing; metrics and events of it are in {log.folder}", err=True)


@click.command()
@click.argument("name", required=False, metavar="[REFRESH|NAME@champion]")
@click.option(
    "--compare",
    nargs=2,
    metavar="A B",
    help="Write an HTML page that compares two refreshes, instead of a report about one.",
)
@click.option("--open", "opened", is_flag=True, help="Open the HTML page in a browser.")
@JSON_OPTION
def report(name: str | None, compare: tuple[str, str] | None, opened: bool, as_json: bool) -> None:
    """Write one HTML page about a refresh (default: the latest), and print its path.

    NAME@champion is the refresh that promoted the champion of this name. The page needs no network and no other file.
    """
    if name and compare:
        raise click.UsageError("expected a refresh, or --compare with two, not both")
    path = _compared(*map(_record, compare)) if compare else _written(_record(name))
    if as_json:
        print_json({"report": str(path)})
    else:
        click.echo(str(path))
    if opened and not webbrowser.open(path.as_uri()):
        click.echo(f"no browser could be started; open {path.as_uri()}", err=True)


def _written(record: RefreshRecord) -> Path:
    from flows.ledger.home import store_root
    from flows.report.page import write_report
    from flows.store.store import Store

    return write_report(record, Store(store_root()).index())


def _compared(old: RefreshRecord, new: RefreshRecord) -> Path:
    from flows.champion.differing import compare, side_of_refresh
    from flows.ledger.home import store_root
    from flows.planning.changes import CONTENTS_CACHE
    from flows.report.page import write_comparison
    from flows.store.store import Store

    store = Store(store_root())
    index = store.index()
    sides = side_of_refresh(old, index), side_of_refresh(new, index)
    differences = compare(*sides, store.cache_folder(CONTENTS_CACHE))
    return write_comparison(old, new, index, differences.by_heading())


def _record(name: str | None) -> RefreshRecord:
    from flows.cli.show import find_refresh
    from flows.ledger.refreshes import ledgers
    from flows.recipe.text import closest

    if name and "@" in name:
        name = _refresh_of(name)
    known = [ledger.folder.name for ledger in ledgers()]
    ledger = find_refresh(name) if name else next((one for one in ledgers() if not one.read().comparison), None)
    if ledger is None and name is None:
        raise StoreError("looking for the latest refresh: there is none yet; `lifecycle run RECIPE` makes one")
    if ledger is None:
        raise StoreError(
            f"looking for {name}: there is none of this name{closest(name or '', known[:20])}; "
            "`lifecycle show` lists them"
        )
    return ledger.read()


def _refresh_of(name: str) -> str:
    """Return the id of the refresh that promoted the version behind an alias, or else that built its artifact."""
    from flows.champion import champions

    uri = name if name.startswith(champions.URI_PREFIX) else f"{champions.URI_PREFIX}{name}"
    version = champions.find_version(champions.connect(), uri)
    attempt = version.promotion or champions.artifact_of(version, version.registration.model).record.attempt
    if attempt is None:
        raise StoreError(f"looking for the refresh that made {name}: it was adopted, not built by one")
    return attempt.partition("/")[0]
