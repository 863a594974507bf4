"""Commands about notifications of refreshes: `lifecycle notify`.

Each command imports what it needs, so that `lifecycle --help` stays fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from flows.cli.answers import JSON_OPTION, print_json

CHANNELS = click.Choice(["webhook", "slack", "email", "ping"])
OCCASIONS = ["failed", "late", "skipped", "not-promoted", "promoted"]


@click.group()
def notify() -> None:
    """Notify a webhook, Slack, or somebody by e-mail of how refreshes end, or that they do not begin."""


@notify.command()
@click.argument("channel", type=CHANNELS)
@click.option("--url-from", required=True, metavar="VARIABLE", help="Environment variable that holds the address.")
@click.option(
    "--on", "occasions", multiple=True, type=click.Choice(OCCASIONS), help="Occasion to notify of; default: all."
)
@JSON_OPTION
def add(channel: Any, url_from: str, occasions: Sequence[Any], as_json: bool) -> None:
    """Notify a channel when a refresh failed, is late or was skipped, or its model was promoted or not.

    Replaces its former notifications. A `ping` asks for its address after each refresh that did not fail, for services
    that notify people when they miss it.
    """
    flows = _notifications()
    _show([flows.notify(channel, url_from, occasions)], as_json)


@notify.command("list")
@JSON_OPTION
def list_notifications(as_json: bool) -> None:
    """List the channels that are notified, and their occasions."""
    _show(_notifications().notifications(), as_json)


@notify.command()
@click.argument("channel", type=CHANNELS)
@JSON_OPTION
def test(channel: Any, as_json: bool) -> None:
    """Send a test notification to a channel, and report whether it was sent."""
    _notifications().send_test(channel)
    print_json({"sent": channel}) if as_json else click.echo(f"a test notification went out by {channel}")


@notify.command()
@click.argument("channel", type=CHANNELS)
@JSON_OPTION
def remove(channel: str, as_json: bool) -> None:
    """Stop notifying a channel."""
    _notifications().remove(channel)
    print_json({"removed": channel}) if as_json else click.echo(f"{channel} is no longer notified")


def _notifications() -> Any:
    """Return the module `flows.service.notifications`, once Prefect's client knows its server."""
    from flows.cli import run_command

    run_command.ready_servers()
    from flows.service import notifications

    return notifications


def _show(notifications: Sequence[Any], as_json: bool) -> None:
    if as_json:
        print_json({"notifications": [asdict(item) for item in notifications]})
    else:
        lines = [f"{item.channel:<8} {', '.join(item.occasions)}" for item in notifications]
        click.echo("\n".join(lines) or "no one is notified")
