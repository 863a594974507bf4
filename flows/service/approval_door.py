"""Decisions about candidates over HTTP, by people whom a signing-in proxy names: the worker's `/approvals`.

    GET  /approvals        what waits for approval
    POST /approvals/NAME   approve or reject it (`Decision`)

The worker opens it where LIFECYCLE_PROXY_KEY_FILE names a file with a key (`lifecycle:KEY`, mode 0600) that the proxy
alone has besides. Who comes with this key is believed to be X-Forwarded-User, of the groups X-Forwarded-Groups, which
have commas between them. A program, `PROGRAM`, looks and decides, since MLflow is large.
"""

import asyncio
import base64
import hmac
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any, Literal

from pydantic import ValidationError

from flows.servers.keyed import USER
from stages.core.errors import ApprovalError
from stages.core.fields import StrictModel, what_is_wrong

PROXY_KEY_VARIABLE = "LIFECYCLE_PROXY_KEY_FILE"
BODY_BYTES = 16 * 2**10
NAME_CHARACTERS = 200
PATIENCE_S = 900.0
"""Seconds that a decision may take, with a new verdict of a candidate whose champion has changed."""
PROGRAM = "flows.champion.decide"
"""Program that acts on an `Order`. It is named as text, because it lies in a room above this one."""
USER_HEADER, GROUPS_HEADER = "x-forwarded-user", "x-forwarded-groups"


class Decision(StrictModel):
    """Decision about a candidate, as `lifecycle approve` and `reject` take it: which version, and why."""

    version: str | None = None
    decision: Literal["approved", "rejected"]
    why: str


class Order(StrictModel):
    """Decision of a person about a candidate of a registered model, for the program that makes it."""

    name: str
    user: str
    groups: frozenset[str]
    decision: Decision


def add_approvals(application: Any, key: str | None) -> None:
    """Add `/approvals` to the worker's ASGI application; without a proxy's key there is none."""
    if key is None:
        return
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response

    expected = f"Basic {base64.b64encode(f'{USER}:{key}'.encode()).decode()}".encode()
    unknown = PlainTextResponse("approvals are asked for through the signing-in proxy\n", 401)
    one_at_a_time = asyncio.Semaphore(1)

    def is_proxy(request: Request) -> bool:
        return hmac.compare_digest(request.headers.get("authorization", "").encode(), expected)

    async def waiting(request: Request) -> Response:
        if not is_proxy(request):
            return unknown
        async with one_at_a_time:
            text, status = await asyncio.to_thread(_run, b"")
        return Response(text, status, media_type="application/json" if status == 200 else "text/plain")

    async def decide(request: Request) -> Response:
        if not is_proxy(request):
            return unknown
        # A page of another site can send no JSON in a person's name without asking first.
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return PlainTextResponse("reading a decision: expected application/json\n", 415)
        try:
            user, groups = person_in(request.headers.getlist(USER_HEADER), request.headers.getlist(GROUPS_HEADER))
            decision = Decision.model_validate_json(await _beginning(request.stream()))
        except ApprovalError as error:
            return PlainTextResponse(f"{error}\n", 403)
        except ValidationError as error:
            return PlainTextResponse(f"reading a decision: {what_is_wrong(error)}\n", 422)
        order = Order(name=request.path_params["name"], user=user, groups=groups, decision=decision)
        async with one_at_a_time:
            return PlainTextResponse(*await asyncio.to_thread(_run, order.model_dump_json().encode()))

    application.add_route("/approvals", waiting)
    application.add_route("/approvals/{name}", decide, methods=["POST"])


async def _beginning(chunks: AsyncIterator[bytes]) -> bytes:
    """Return a body, or as much of one that is too long as shows that."""
    body = b""
    async for chunk in chunks:
        body += chunk
        if len(body) > BODY_BYTES:
            break
    return body[: BODY_BYTES + 1]


def person_in(users: list[str], groups: list[str]) -> tuple[str, frozenset[str]]:
    """Return the name and groups in the values of the proxy's headers. Raises ApprovalError for other than one name."""
    named = [user.strip() for user in users]
    if len(named) != 1 or not named[0].isprintable() or not 0 < len(named[0]) <= NAME_CHARACTERS:
        raise ApprovalError(f"deciding about a champion: the proxy names no one; expected one name in {USER_HEADER}")
    return named[0], frozenset(name.strip() for name in ",".join(groups).split(",")) - {""}


def _run(order: bytes) -> tuple[str, int]:
    """Have the program act on an order; return its message, and the status of the answer."""
    command = [sys.executable, "-m", PROGRAM]
    try:
        done = subprocess.run(command, input=order, stdout=subprocess.PIPE, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the decision took more than {PATIENCE_S:g} s; the same one again completes it\n", 504
    return done.stdout.decode(), {0: 200, ApprovalError.exit_code: 403}.get(done.returncode, 500)
