"""`lifecycle retry`, `runs` and `logs`: what became of refreshes. Imports only what a command needs."""

from __future__ import annotations

import click

from flows.cli.answers import JSON_OPTION, print_json, warn_of_missing_worker


@click.command()
@click.argument("refresh", required=False)
@JSON_OPTION
def retry(refresh: str | None, as_json: bool) -> int:
    """Go on with a refresh that failed, was stopped or killed (default: the latest).

    Stages that are done are reused; the one that failed continues from its last checkpoint.
    """
    from flows.cli import run_command

    return run_command.answer(run_command.retry_refresh(refresh, quiet=as_json), as_json)


@click.command()
@click.option("--recipe", metavar="NAME", help="Only those of a recipe.")
@click.option("--stage", metavar="NAME", help="Only those of a stage.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="How many, newest first.")
@JSON_OPTION
def runs(recipe: str | None, stage: str | None, limit: int, as_json: bool) -> None:
    """List the latest tries at building stages, how each ended, and its MLflow run."""
    from flows.cli import runs as listed

    unreadable: list[str] = []
    found = listed.stage_runs(recipe=recipe, stage=stage, limit=limit, unreadable=unreadable)
    print_json(listed.as_json(found)) if as_json else click.echo(listed.as_text(found))
    for sentence in listed.not_listed(unreadable):
        click.echo(sentence, err=True)
    warn_of_missing_worker()


@click.command()
@click.argument("name", metavar="STAGE|VERSION")
@click.option("--refresh", metavar="ID", help="Of this refresh (default: the latest that tried to build the stage).")
@click.option("--follow", "-f", is_flag=True, help="Go on printing until the stage has ended.")
def logs(name: str, refresh: str | None, follow: bool) -> None:
    """Print what all processes of a stage have printed, in its latest attempt or for its artifact."""
    from flows.cli.logs import find_log

    log, is_empty = find_log(name, refresh), True
    for text in log.read(follow):
        click.echo(text, nl=False)
        is_empty = False
    if is_empty:
        click.echo(f"the processes of {name} printed nothing; metrics and events of it are in {log.folder}", err=True)
