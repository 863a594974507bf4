"""Commands about registered models: `lifecycle champion`, `rollback`, `canary`."""

from typing import Any

import click

from flows.cli.answers import JSON_OPTION, print_json

WHY_OPTION = click.option("--why", help="Reason, kept with your name where champions are approved, and required there.")


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
@click.argument("version", required=False)
@click.option("--why", required=True, help="Reason for the decision, kept with your name and the time.")
@JSON_OPTION
def approve(name: str, version: str | None, why: str, as_json: bool) -> None:
    """Approve VERSION of a promotion that waits for it: the candidate becomes champion of NAME.

    If another became champion meanwhile, the candidate is compared with that one first, and must keep all gates.
    """
    _decide(name, version, "approved", why, as_json)


@click.command()
@click.argument("name")
@click.argument("version", required=False)
@click.option("--why", required=True, help="Reason for the decision, kept with your name and the time.")
@JSON_OPTION
def reject(name: str, version: str | None, why: str, as_json: bool) -> None:
    """Reject VERSION of a promotion that waits for approval: the champion of NAME stays."""
    _decide(name, version, "rejected", why, as_json)


def _decide(name: str, version: str | None, decision: Any, why: str, as_json: bool) -> None:
    from flows.champion import approvals, champions
    from flows.ledger.people import user_of_this_process
    from flows.running.outcome import verdict_sentence
    from stages.core.approval import read_result

    champions.find_mlflow()
    artifact = approvals.decide(name, version, decision, user_of_this_process(), why)
    if as_json:
        print_json({"name": name, "artifact": str(artifact), **read_result(artifact).tags})
    else:
        click.echo(verdict_sentence(artifact))


@click.command()
@click.argument("name")
@WHY_OPTION
@JSON_OPTION
def rollback(name: str, why: str | None, as_json: bool) -> None:
    """Make the previous champion champion again; a second rollback takes the first one back."""
    from flows.champion import approvals, champions
    from flows.champion.registrations import promotion_lock

    registry = champions.connect()
    present = champions.find(registry, name, "champion")
    approval = approvals.approve_change(registry, present, "a rollback", why)
    with promotion_lock(name):
        restored = registry.rollback(name)
        registry.note_approval(restored, approval)
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
@WHY_OPTION
@JSON_OPTION
def canary(name: str, version: int | None, promote: bool, withdraw: bool, why: str | None, as_json: bool) -> None:
    """Make VERSION of a registered model the challenger: `serve --follow --canary` sends it some requests.

    Without a VERSION, show the challenger, and what both have answered where this machine serves them; promote it or
    withdraw it.
    """
    from flows.champion import approvals, champions
    from flows.champion.registrations import promotion_lock

    if sum((bool(version), promote, withdraw)) > 1:
        raise click.UsageError("expected one of VERSION, --promote and --withdraw")
    registry = champions.connect()
    if version:
        challenger = champions.find_version(registry, f"models:/{name}/{version}")
        approval = approvals.approve_change(registry, challenger, "a challenge", why)
        registry.challenge(challenger)
        registry.note_approval(challenger, approval)
    elif withdraw:
        registry.withdraw_challenger(name)
    elif promote:
        challenger = champions.find(registry, name, "challenger")
        approval = approvals.approve_change(registry, challenger, "a promotion of the challenger", why)
        with promotion_lock(name):
            registry.note_approval(registry.promote_challenger(name), approval)
    _show(registry, champions.find(registry, name, "champion"), as_json)


def _show(registry: Any, version: Any, as_json: bool) -> None:
    from flows.champion import approvals, champions
    from flows.champion.servers_folder import as_lines, served_canaries
    from flows.ledger.home import store_root
    from flows.store.store import Store

    waiting = [one.text for one in approvals.awaited(Store(store_root()).index(), version.name)]
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
                "approvers": registry.approvers(version.name),
                "waiting": waiting,
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
    for line in waiting:
        click.echo(line)
    for served in served_canaries(version.name):
        click.echo("\n".join(as_lines(served)))
