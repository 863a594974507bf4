"""Access control for the local servers: it refuses requests with a foreign host name or origin, or without the key.

A web page that somebody has open in a browser can send requests to the loopback interface, too. They carry the page's
`Origin`; a page whose own name resolves to 127.0.0.1 (DNS rebinding) sends that name as `Host`.
"""

import base64
import hmac
from collections.abc import Awaitable, Callable, Collection, Iterable, MutableMapping
from contextlib import suppress
from typing import Any

from flows.servers.keyed import USER

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

LOGIN_PATH = "/lifecycle-login"
HEALTH_PATHS = ("/health",)
REFUSED = (401, "this server asks for a key: `lifecycle status --open` logs you in")
LOGIN_PAGE = """<!doctype html><title>llm-lifecycle</title><script>
// What stands behind the `#` is sent to no server: the key, which Prefect's pages keep so, or a page of MLflow's.
const found = decodeURIComponent(location.hash.slice(1));
const [key, page] = found.startsWith("/") ? ["", "/#" + found] : [found, ""];
if (key) localStorage.setItem("prefect-password", btoa(key));
localStorage.setItem("mlflow.workflowType_v1", '"machine_learning"');  // MLflow's pages: runs, not traces,
localStorage.setItem("mlflow.assistant.fab.autoOpenedOnFirstLoad_v1", "true");  // and no assistant beside them
location.replace(location.origin + page);
</script>"""


def origins(hosts: Iterable[str]) -> list[str]:
    """Return the origins that requests may name: each host with http, and https behind a TLS proxy."""
    return [f"{scheme}://{host}" for host in hosts for scheme in ("http", "https")]


def content_policy(hosts: Iterable[str]) -> bytes:
    """Return the Content-Security-Policy: pages load only from their own server; Prefect's would ask amplitude.com."""
    names = [origin.replace("http", scheme, 1) for origin in origins(hosts) for scheme in ("http", "ws")]
    return f"default-src 'self' {' '.join(sorted(names))} 'unsafe-inline' 'unsafe-eval' data: blob:".encode()


class AccessControl:
    """ASGI middleware that checks each request's host, origin and key before it passes it to an application.

    hosts: the server's names for clients: `NAME:PORT`. password: required by basic authentication on every path except
    that of health; None when the application does so.
    """

    def __init__(self, application: Any, hosts: Collection[str], password: str | None = None):
        self._application = application
        self._hosts = frozenset(hosts)
        self._origins = frozenset(origins(hosts))
        self._content_policy = content_policy(self._hosts)
        credentials = base64.b64encode(f"{USER}:{password}".encode()).decode()
        self._authorization = f"Basic {credentials}" if password else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request with a refusal or the login page, or pass the request to the application."""
        refusal = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if refusal and scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif refusal:
            await _answer(send, *refusal)
        elif scope["type"] == "http" and scope["path"] == LOGIN_PATH:
            await _answer(send, 200, LOGIN_PAGE, "text/html")
        elif scope["type"] == "http":
            await self._application(scope, receive, self._with_policy(send))
        else:
            await self._application(scope, receive, send)

    def _with_policy(self, send: Send) -> Send:
        async def sent(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"content-security-policy", self._content_policy)]
                message = {**message, "headers": headers}
            await send(message)

        return sent

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return the HTTP status and message for a request that must be refused; None for an acceptable request."""
        headers: dict[str, set[str]] = {}
        for name, value in scope["headers"]:
            # All values of a name: of two `Host` headers both must be right, whichever the application reads.
            headers.setdefault(name.decode("latin-1").lower(), set()).add(value.decode("latin-1"))
        if {"content-length", "transfer-encoding"} <= headers.keys():  # its end is ambiguous: request smuggling
            return 400, "this request gives its length in two ways"
        # A request without `Host` is refused, too.
        if not headers.get("host", {""}) <= self._hosts:
            expected = " or ".join(sorted(self._hosts))
            return 403, f"this server is called {expected} only; forward its port under the same number"
        # Empty for programs, which send no origin.
        if not headers.get("origin", set()) <= self._origins:
            return 403, "pages of other origins may not use this server"
        given = ",".join(headers.get("authorization", ()))
        if self._authorization is None:
            # Prefect compares what it decodes as text, which fails for letters beyond ASCII (500).
            with suppress(ValueError):  # it is no base64, which Prefect refuses itself
                if not base64.b64decode(given.partition(" ")[2]).isascii():
                    return REFUSED
            return None
        if scope["path"] in HEALTH_PATHS:
            return None
        # In constant time: how long a comparison takes would tell how much of the key is right.
        if not hmac.compare_digest(given.encode(), self._authorization.encode()):
            return REFUSED
        return None


async def _answer(send: Send, status: int, text: str, content_type: str = "text/plain") -> None:
    headers = [(b"content-type", f"{content_type}; charset=utf-8".encode()), (b"cache-control", b"no-store")]
    if status == 400:
        # What follows may be a smuggled request.
        headers.append((b"connection", b"close"))
    if status == 401:
        headers.append((b"www-authenticate", b'Basic realm="llm-lifecycle"'))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})
