"""Commands about registered models: `lifecycle champion`, `rollback`, `canary`."""

from typing import Any

import click

from flows.cli.answers import JSON_OPTION, print_json


@click.command()
@click.argument("name")
@JSON_OPTION
def champion(name: str, as_json: bool) -> None:
    """Show a registered model's champion, its artifact, and which version a rollback would restore."""
    from flows.champion import champions

    registry = champions.connect()
    _show(registry, champions.find(registry, name, "champion"), as_json)


@click.command()
@click.argument("name")
@JSON_OPTION
def rollback(name: str, as_json: bool) -> None:
    """Make the previous champion champion again; a second rollback takes the first one back."""
    from flows.champion import champions
    from flows.champion.registrations import promotion_lock

    registry = champions.connect()
    champions.find(registry, name, "champion")
    with promotion_lock(name):
        restored = registry.rollback(name)
    _show(registry, restored, as_json)


@click.command()
@click.argument("name")
@click.argument("version", type=click.IntRange(1), required=False)
@click.option("--promote", is_flag=True, help="Make the challenger of the model its champion.")
@click.option(
    "--withdraw",
    is_flag=True,
    help="Remove the alias `challenger`, so that no server sends requests to the challenger any more.",
)
@JSON_OPTION
def canary(name: str, version: int | None, promote: bool, withdraw: bool, as_json: bool) -> None:
    """Make VERSION of a registered model the challenger: `serve --follow --canary` sends it some requests.

    Without a VERSION, show the challenger, and what both have answered where this machine serves them; promote it or
    withdraw it.
    """
    from flows.champion import champions
    from flows.champion.registrations import promotion_lock

    if sum((bool(version), promote, withdraw)) > 1:
        raise click.UsageError("expected one of VERSION, --promote and --withdraw")
    registry = champions.connect()
    if version:
        registry.challenge(champions.find_version(registry, f"models:/{name}/{version}"))
    elif withdraw:
        registry.withdraw_challenger(name)
    elif promote:
        champions.find(registry, name, "challenger")
        with promotion_lock(name):
            registry.promote_challenger(name)
    _show(registry, champions.find(registry, name, "champion"), as_json)


def _show(registry: Any, version: Any, as_json: bool) -> None:
    from flows.champion import champions
    from flows.champion.servers_folder import as_lines, served_canaries

    previous, challenger = (registry.find(version.name, alias) for alias in ("previous", "challenger"))
    folder, base = champions.artifact_of(version, version.registration.model).folder, champions.base_of(version)
    if as_json:
        print_json(
            {
                "name": version.name,
                "version": version.number,
                "model": version.registration.model,
                "folder": str(folder),
                "base": str(base.folder) if base else None,
                "evaluations": version.registration.evaluations,
                "previous": previous.number if previous else None,
                "challenger": challenger.number if challenger else None,
                "served": served_canaries(version.name),
            }
        )
        return
    click.echo(f"{version.name}: version {version.number} is champion: {version.registration.model} in {folder}")
    if base:
        click.echo(f"it is an adapter of {version.registration.base} in {base.folder}")
    click.echo(f"previous: version {previous.number}, {previous.registration.model}" if previous else "previous: none")
    if challenger:
        click.echo(f"challenger: version {challenger.number}, {challenger.registration.model}")
    for served in served_canaries(version.name):
        click.echo("\n".join(as_lines(served)))
