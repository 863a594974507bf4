"""Commands about notifications of how refreshes end: `lifecycle notify`."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from flows.cli.answers import JSON_OPTION, print_json

CHANNELS = click.Choice(["webhook", "slack", "email", "ping"])
OCCASIONS = ["failed", "late", "skipped", "not-promoted", "waiting", "promoted"]


@click.group()
def notify() -> None:
    """Send notifications to a webhook, Slack or an e-mail address when refreshes end, fail or do not begin."""


@notify.command()
@click.argument("channel", type=CHANNELS)
@click.option(
    "--url-from",
    required=True,
    metavar="VARIABLE",
    help="Environment variable that holds the channel's address (its URL).",
)
@click.option(
    "--on",
    "occasions",
    multiple=True,
    type=click.Choice(OCCASIONS),
    help="Event to notify of; repeatable; default: all events.",
)
@JSON_OPTION
def add(channel: Any, url_from: str, occasions: Sequence[Any], as_json: bool) -> None:
    """Notify a channel when a refresh fails, is late or is skipped, or its model is promoted or not.

    Replaces its former notifications. A `ping` asks for its address after each refresh that did not fail, for services
    that notify people when they miss it.
    """
    flows = _notifications()
    _show([flows.notify(channel, url_from, occasions)], as_json)


@notify.command("list")
@JSON_OPTION
def list_notifications(as_json: bool) -> None:
    """List the channels that get notifications, and the events that each is notified of."""
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
    """Stop sending notifications to a channel."""
    _notifications().remove(channel)
    print_json({"removed": channel}) if as_json else click.echo(f"{channel} is no longer notified")


def _notifications() -> Any:
    """Return the module `flows.service.notifications`, imported only once Prefect's client points to its server."""
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
