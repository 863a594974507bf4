"""Notifications of how refreshes end, or that they do not begin, and pings after each that ran: Prefect automations.

The server sends them, so that they come also when the process of a refresh, or the worker, was killed. That the server
itself is gone, a service finds out that misses its pings (a dead man's switch). Addresses may hold secrets:
they are taken from the environment, and Prefect keeps them encrypted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args

import httpx
from apprise import Apprise
from prefect.automations import Automation
from prefect.blocks.abstract import NotificationBlock, NotificationError
from prefect.blocks.core import Block
from prefect.blocks.notifications import CustomWebhookNotificationBlock, SlackWebhook
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture, ResourceSpecification

from flows.recipe.text import closest
from flows.running.flow_runs import prefect_client
from flows.running.refresh import refresh
from stages.core.errors import RecipeError, ServerError
from stages.core.redaction import redact

Channel = Literal["webhook", "slack", "email", "ping"]
Occasion = Literal["failed", "late", "skipped", "not-promoted", "promoted"]
STATES: dict[str, tuple[str, ...]] = {
    "failed": ("Failed", "Crashed"),
    "late": ("Late",),
    "skipped": ("Skipped", "Superseded"),
    "not-promoted": ("NotPromoted",),
    "promoted": ("Promoted",),
    "ran": ("Completed", "Cached", "Promoted", "NotPromoted", "StillNotPromoted"),
}
"""Occasion → names of states; `ran`, a ping's own, is each end of a refresh but failures."""
SCHEMES: dict[Channel, tuple[str, ...]] = {
    "webhook": ("http://", "https://"),
    "slack": ("https://hooks.slack.com/services/",),
    "email": ("mailto://", "mailtos://"),
    "ping": ("http://", "https://"),
}
BLOCKS: dict[Channel, type[Block]] = {
    "webhook": CustomWebhookNotificationBlock,
    "slack": SlackWebhook,
    # Prefect has no block for e-mail by SMTP. Addresses that are not Slack's, this one hands to Apprise as they are.
    "email": SlackWebhook,
    "ping": CustomWebhookNotificationBlock,
}
FORMS: dict[Channel, str] = {
    "slack": "https://hooks.slack.com/services/T…/B…/…",
    "email": "mailto://USER:PASSWORD@HOST?to=ADDRESS, with &from=ADDRESS if the host is a number",
}
PREFIX = "lifecycle-notify-"
# Before it begins, a flow run has a name that Prefect made up.
NAME = "{% if flow_run.run_count or not deployment %}{{ flow_run.name }}{% else %}{{ deployment.name }}{% endif %}"
SUBJECT = NAME + ": {{ flow_run.state.name }}"
LATE = (
    "was due at {{ (flow_run.expected_start_time|string)[:16] }} UTC, and no worker has begun it; look at "
    "`lifecycle status` there: `lifecycle up` starts the worker, which then begins the latest refresh that is due"
)
LINK = "{% if flow_run|ui_url %}\nPrefect: {{ flow_run|ui_url }}{% endif %}"  # a server of others may not know it
BODY = f"{{% if flow_run.state.name == 'Late' %}}{LATE}{{% else %}}{{{{ flow_run.state.message }}}}{{% endif %}}{LINK}"
ONCE_WITHIN = timedelta(minutes=1)
"""A state of a flow run is notified of once: where the disk is full, Prefect sets its last state several times."""


@dataclass(frozen=True)
class Notification:
    """Which channel is notified of what."""

    channel: str
    occasions: tuple[str, ...]


def notify(channel: Channel, address_variable: str, occasions: Sequence[Occasion] = ()) -> Notification:
    """Notify `channel` whenever a refresh ends so, by default on all occasions; replaces its former notifications.

    address_variable: the environment variable that holds the address: the URL of a webhook (it gets a JSON object
    with `subject` and `body`), of a Slack webhook, mailto://USER:PASSWORD@HOST?to=ADDRESS, as Apprise reads it, or the
    URL that a ping asks for (GET) after each refresh that ran, whatever became of its model. A ping has no occasions.
    Raises `RecipeError` for an address of another kind; `ServerError` when Prefect does not answer.
    """
    if channel == "ping" and occasions:
        raise RecipeError("a ping is sent after each refresh that ran and did not fail; leave out `--on`")
    wanted = ("ran",) if channel == "ping" else tuple(occasions) or get_args(Occasion)
    block = _block(channel, _address(channel, address_variable))
    with prefect_client() as client:
        block_id = block.save(PREFIX + channel, overwrite=True)
        for known in client.read_automations_by_name(PREFIX + channel):
            client.delete_automation(known.id)
        client.create_automation(
            AutomationCore(
                name=PREFIX + channel,
                description=f"Notifies {channel} of refreshes that ended: {', '.join(wanted)}.",
                trigger=_trigger(wanted),
                actions=[SendNotification(block_document_id=block_id, subject=SUBJECT, body=BODY)],
            )
        )
    return Notification(channel, wanted)


def notifications() -> list[Notification]:
    """All of them, by channel. Raises `ServerError` when Prefect does not answer."""
    with prefect_client() as client:
        found = [one for one in client.read_automations() if one.name.startswith(PREFIX)]
        return sorted((_describe(one) for one in found), key=lambda one: one.channel)


def remove(channel: str) -> None:
    """Stop notifying a channel, and forget its address. Raises `RecipeError` when it is not notified anyway."""
    with prefect_client() as client:
        found = client.read_automations_by_name(PREFIX + channel)
        if not found:
            raise RecipeError(f"there are no notifications by {channel}{closest(channel, get_args(Channel))}")
        for one in found:
            client.delete_automation(one.id)
            for action in one.actions:
                client.delete_block_document(action.block_document_id)


def send_test(channel: Channel) -> None:
    """Notify a channel from here, now. Raises `RecipeError` when it is not notified, `ServerError` when that fails."""
    with prefect_client() as client:
        if not client.read_automations_by_name(PREFIX + channel):
            raise RecipeError(f"there are no notifications by {channel}; `lifecycle notify add {channel}` adds them")
    block = BLOCKS[channel].load(PREFIX + channel, _sync=True)
    assert isinstance(block, NotificationBlock)
    try:
        with block.raise_on_failure():
            block.notify(subject="llm-lifecycle: a test", body="Notifications of refreshes come this way.", _sync=True)
    except httpx.HTTPStatusError as error:  # its message holds the address
        raise ServerError(f"notifying by {channel}: the webhook answered {error.response.status_code}") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(f"notifying by {channel}: the webhook does not answer: {type(error).__name__}") from None
    except NotificationError as error:
        said = redact(error.log.strip()) or "it was not sent, and nothing says why"
        raise ServerError(f"notifying by {channel}: {said}; correct the address with `lifecycle notify add`") from None


def _address(channel: Channel, variable: str) -> str:
    address = os.environ.get(variable)
    expected = " or ".join(f"{scheme}…" for scheme in SCHEMES[channel])
    if not address:
        raise RecipeError(
            f"notifying by {channel}: the environment variable {variable} is not set; expected {expected}"
        )
    if not address.startswith(SCHEMES[channel]):
        raise RecipeError(f"notifying by {channel}: what {variable} holds does not begin with {expected}")
    if BLOCKS[channel] is SlackWebhook and not _is_read_by_apprise(address):
        remedy = f"expected {FORMS[channel]}"
        raise RecipeError(f"notifying by {channel}: what {variable} holds is no whole address; {remedy}")
    if channel in ("webhook", "ping") and not _is_url(address):
        raise RecipeError(f"notifying by {channel}: what {variable} holds is no URL; expected http://HOST:PORT/PATH")
    return address


def _is_url(address: str) -> bool:
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL:
        return False
    return bool(url.host) and (url.port is None or 0 < url.port < 2**16)


def _is_read_by_apprise(address: str) -> bool:
    """Whether the library that sends it can make something of it; Prefect would say so only when it should send."""
    logging.getLogger("apprise").setLevel(logging.CRITICAL)
    return bool(Apprise().add(address))


def _block(channel: Channel, address: str) -> Block:
    if BLOCKS[channel] is SlackWebhook:
        return SlackWebhook(url=address)
    asked = {"method": "GET"} if channel == "ping" else {"json_data": {"subject": "{{subject}}", "body": "{{body}}"}}
    return CustomWebhookNotificationBlock(
        name="llm-lifecycle", url="{{address}}", secrets={"address": address}, **asked
    )


def _trigger(occasions: Sequence[str]) -> EventTrigger:
    flow = ResourceSpecification({"prefect.resource.role": "flow", "prefect.resource.name": refresh.name})
    return EventTrigger(
        posture=Posture.Reactive,
        expect={event for occasion in occasions for event in _events(occasion)},
        match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
        match_related=flow,
        # A run that is late and then fails is notified of twice. A promotion has two events, and needs one ping.
        for_each={"prefect.resource.id"} | (set() if "ran" in occasions else {"prefect.state-name"}),
        threshold=1,
        within=ONCE_WITHIN,
    )


def _events(occasion: str) -> set[str]:
    """Return the events of an occasion: Prefect names the one of a flow run after the name of its new state."""
    return {f"prefect.flow-run.{name}" for name in STATES[occasion]}


def _describe(automation: Automation) -> Notification:
    expected = automation.trigger.expect
    ping = expected >= _events("ran")
    occasions = ("ran",) if ping else tuple(one for one in get_args(Occasion) if expected >= _events(one))
    return Notification(automation.name.removeprefix(PREFIX), occasions)
