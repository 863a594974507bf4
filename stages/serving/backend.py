"""Backends of the proxy (an engine, or one model in an engine), and the choice between champion and canary.

A canary gets a share of the requests by a hash of their session, user or client address, so that no one is answered by
one version now and by another later.
"""

import asyncio
import hashlib
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from stages.remote.http import Answer, Expected, ask_aiohttp, server_headers
from stages.serving.pictures import Limits
from stages.serving.tally import ServedVersion

SESSION_HEADER = "X-Session-Id"


@dataclass(frozen=True)
class EngineAddress:
    """Address of an engine: a Unix socket, or a port on 127.0.0.1. named: URL, without `/v1`, of others' engine."""

    socket: Path | None = None
    port: int | None = None
    named: str | None = None

    def connector(self) -> aiohttp.BaseConnector:
        """Return an aiohttp connector with a new connection for each request: an engine may just close a kept one."""
        if self.socket:
            return aiohttp.UnixConnector(str(self.socket), limit=0, force_close=True)
        return aiohttp.TCPConnector(limit=0, force_close=True)

    @property
    def url(self) -> URL:
        return URL(self.named or (f"http://127.0.0.1:{self.port}" if self.port else "http://engine"))


def post_to_engine(
    address: EngineAddress,
    expected: Expected,
    route: str,
    bodies: Iterable[dict[str, Any]],
    query: Mapping[str, str] = MappingProxyType({}),
) -> list[Answer]:
    """Post requests to an engine itself, not its proxy; return the answers in order; raises as `ask_aiohttp`."""

    async def post() -> list[Answer]:
        headers = server_headers(expected.key)
        async with aiohttp.ClientSession(connector=address.connector(), headers=headers) as session:
            url = (address.url / route).with_query(query)
            return [await ask_aiohttp(session, expected, "POST", url, json=body) for body in bodies]

    return asyncio.run(post())


@dataclass(frozen=True)
class Naming:
    """Two names of one model: the public name that clients send, and the name inside an engine with several models."""

    public: str
    inside: str


class Backend:
    """Backend of the proxy (an engine, or one model in it), with the number of requests that it is answering.

    naming: None for an engine whose names are public. version: None if no versions are compared; so they pass unread.
    limits: largest numbers of media in a request.
    """

    def __init__(
        self,
        address: EngineAddress,
        naming: Naming | None = None,
        version: ServedVersion | None = None,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
    ):
        self.address = address
        self.naming = naming
        self.version = version
        self.limits = limits
        self.is_gone = False
        self.num_requests = 0
        self.idle = threading.Event()
        self.idle.set()


@dataclass(frozen=True)
class Canary:
    """Canary: a second model version that answers a share (0 to 1) of the requests."""

    backend: Backend
    share: float

    def takes(self, key: str) -> bool:
        """Return whether the canary answers clients with this key; the same version always gets the same keys."""
        version = self.backend.version
        digest = hashlib.sha256(f"{version.version if version else ''}\n{key}".encode("utf-8", "surrogatepass"))
        # Hashes are uniform over 64 bits: a `share` of all keys lies below the bound.
        return int.from_bytes(digest.digest()[:8]) < self.share * 2**64


def sticky_key(request: web.BaseRequest, asked: dict[str, Any] | None) -> str:
    """Return a client's lasting key: the session's header, else OpenAI's `user`, else the client's address."""
    if session := request.headers.get(SESSION_HEADER):
        return f"session {session}"
    user = asked.get("user") if asked else None
    return f"user {user}" if user and isinstance(user, str) else f"address {request.remote}"
