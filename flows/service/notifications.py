"""Notifications about how refreshes end, or that they do not begin, sent by Prefect's server (automations).

The server sends them, so they arrive also when the process of a refresh, or the worker, was killed. If the server
itself is gone, a service notices that misses the pings (a dead man's switch). Addresses may hold secrets: they are read
from the environment, and Prefect keeps them encrypted.
"""

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
Occasion = Literal["failed", "late", "skipped", "not-promoted", "waiting", "promoted"]
STATES: dict[str, tuple[str, ...]] = {
    "failed": ("Failed", "Crashed"),
    "late": ("Late",),
    "skipped": ("Skipped", "Superseded"),
    "not-promoted": ("NotPromoted",),
    "waiting": ("WaitingForApproval",),
    "promoted": ("Promoted",),
    "ran": ("Completed", "Cached", "Promoted", "NotPromoted", "StillNotPromoted", "WaitingForApproval"),
}
"""Prefect states that cause a notification, by its occasion. `ran`, only for pings, is every end but a failure."""
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
# Another server may not know the address of its UI.
LINK = "{% if flow_run|ui_url %}\nPrefect: {{ flow_run|ui_url }}{% endif %}"
BODY = f"{{% if flow_run.state.name == 'Late' %}}{LATE}{{% else %}}{{{{ flow_run.state.message }}}}{{% endif %}}{LINK}"
ONCE_WITHIN = timedelta(minutes=1)
"""Time for a single notification of a refresh's state; Prefect repeats a final state when the disk is full."""


@dataclass(frozen=True)
class Notification:
    """Notification channel, such as e-mail, with the occasions on which it gets a message."""

    channel: str
    occasions: tuple[str, ...]


def notify(channel: Channel, address_variable: str, occasions: Sequence[Occasion] = ()) -> Notification:
    """Have Prefect send a message to `channel` on the given occasions (default: all), in place of earlier settings.

    address_variable: the environment variable that holds the address: the URL of a webhook (it gets a JSON object with
    `subject` and `body`), of a Slack webhook, mailto://USER:PASSWORD@HOST?to=ADDRESS, as Apprise reads it, or the URL
    that a ping requests (GET) after each refresh that ran; a ping has no occasions. Raises `RecipeError` for an address
    of another kind; `ServerError` when Prefect does not answer.
    """
    if channel == "ping" and occasions:
        raise RecipeError("a ping is sent after each refresh that ran and did not fail; leave out `--on`")
    wanted = ("ran",) if channel == "ping" else tuple(occasions) or get_args(Occasion)
    block = _block(channel, _address(channel, address_variable))
    with prefect_client() as client:
        # The address before the automation that refers to it.
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
    """Return all configured notifications, by channel. Raises `ServerError` when Prefect does not answer."""
    with prefect_client() as client:
        automations = [one for one in client.read_automations() if one.name.startswith(PREFIX)]
        return sorted((_describe(one) for one in automations), key=lambda notification: notification.channel)


def remove(channel: str) -> None:
    """Stop notifying a channel and delete its address. Raises `RecipeError` when the channel gets no notifications."""
    with prefect_client() as client:
        automations = client.read_automations_by_name(PREFIX + channel)
        if not automations:
            raise RecipeError(f"there are no notifications by {channel}{closest(channel, get_args(Channel))}")
        for automation in automations:
            client.delete_automation(automation.id)
            for action in automation.actions:
                client.delete_block_document(action.block_document_id)


def send_test(channel: Channel) -> None:
    """Send a test notification to a channel. Raises `RecipeError` if none is configured, `ServerError` on failure."""
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
        reason = redact(error.log.strip()) or "it was not sent, for an unknown reason"
        raise ServerError(
            f"notifying by {channel}: {reason}; correct the address with `lifecycle notify add`"
        ) from None


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
    """Return whether Apprise, which sends the message, accepts an address; Prefect would check that only on sending."""
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
    """Return the names of Prefect's events for a notification occasion such as `failed`, one for each Prefect state."""
    return {f"prefect.flow-run.{name}" for name in STATES[occasion]}


def _describe(automation: Automation) -> Notification:
    expected = automation.trigger.expect
    ping = expected >= _events("ran")
    occasions = ("ran",) if ping else tuple(one for one in get_args(Occasion) if expected >= _events(one))
    return Notification(automation.name.removeprefix(PREFIX), occasions)
