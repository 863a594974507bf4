"""`lifecycle champion` and `rollback`: what concerns registered models. Imports only what a command needs."""

from __future__ import annotations

from typing import Any

import click

from flows.cli.answers import JSON_OPTION, print_json


@click.command()
@click.argument("name")
@JSON_OPTION
def champion(name: str, as_json: bool) -> None:
    """Show the champion of a registered model, where it is, and which version a rollback would restore."""
    from flows.champion import champions

    registry = champions.connect()
    _show(registry, champions.find(registry, name, "champion"), as_json)


@click.command()
@click.argument("name")
@JSON_OPTION
def rollback(name: str, as_json: bool) -> None:
    """Make the previous champion champion again; a second rollback takes the first one back."""
    from flows.champion import champions
    from flows.champion.registrations import only_one

    registry = champions.connect()
    with only_one(name):
        restored = registry.rollback(name)
    _show(registry, restored, as_json)


def _show(registry: Any, version: Any, as_json: bool) -> None:
    from flows.champion import champions

    previous = registry.find(version.name, "previous")
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
            }
        )
        return
    click.echo(f"{version.name}: version {version.number} is champion: {version.registration.model} in {folder}")
    if base:
        click.echo(f"it is an adapter of {version.registration.base} in {base.folder}")
    click.echo(f"previous: version {previous.number}, {previous.registration.model}" if previous else "previous: none")
