"""HTTP helpers of the proxy: headers that it forwards, request bodies of limited size, and error responses."""

from collections.abc import Iterable, Mapping
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

NOT_PASSED_ON = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        *("host", "date", "server", "origin", "expect"),
    }
)
"""Headers that concern one connection (RFC 9110, section 7.6.1) or one server, which the proxy does not forward.

`Origin`, too: an engine would check it against its allowed origins, but the proxy stands in for the client."""
NOT_SENT = frozenset(name.encode() for name in ("content-length", *NOT_PASSED_ON))


def passed(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Return those headers of the engine's answer that the proxy forwards to the client."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in NOT_PASSED_ON)


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a request's header lines for the engine, without Content-Length, as the body may differ."""
    return b"".join(b"%b: %b\r\n" % header for header in headers if header[0].lower() not in NOT_SENT)


async def body_of(request: web.BaseRequest, max_bytes: int) -> bytes | None:
    """Read the body of a client's request; None if it has more than `max_bytes`."""
    parts, size = [], 0
    async for part in request.content.iter_any():
        size += len(part)
        if size > max_bytes:
            return None
        parts.append(part)
    return b"".join(parts)


def error(status: int, message: str, headers: dict[str, str] | None = None, kind: str | None = None) -> web.Response:
    """Return an error response in the JSON form that OpenAI's clients expect. kind: one of OpenAI's own codes."""
    content: dict[str, Any] = {"error": {"message": message, "type": kind or "ProxyError", "code": kind or status}}
    return web.json_response(content, status=status, headers=headers)
