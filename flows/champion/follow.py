"""Serves the present champion: `lifecycle serve models:/NAME@champion --follow`.

A proxy listens on the public port; behind it stands the vLLM server of the present champion. When the alias moves, a
second server is started; once that is healthy, new requests go there, and the first one ends after its last answer.
For that time, the device must have room for both.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import uvicorn

from flows.champion import champions
from flows.champion.registry import RegisteredVersion, Registry
from flows.ledger.home import home
from stages.core.errors import LifecycleError, RefreshStoppedError
from stages.serving.config import ServeExecution
from stages.serving.lines import say, starting_lines
from stages.serving.proxy import Backend, Proxy
from stages.serving.server import API_KEY_VARIABLE, Server, reachable, reserve_port, started_server

POLL_INTERVAL_S = 5.0
LAST_ANSWERS_TIMEOUT_S = 30


@dataclass(frozen=True)
class Serving:
    """A champion and its server, which ends when `stack` is closed."""

    version: RegisteredVersion
    server: Server
    stack: ExitStack


class Follower:
    """Serves the version that an alias of a registered model points to, until it is interrupted."""

    def __init__(self, registry: Registry, name: str, alias: str):
        self._registry = registry
        self._name = name
        self._alias = alias
        self._stopping = threading.Event()
        self._failed: str | None = None
        self._last_trouble: str | None = None

    def serve(self, host: str, port: int | None) -> None:
        """Raises StoreError when there is no champion, ResourceError for a taken port, ServerError for a server that
        does not start, or ends by itself."""
        version = champions.find(self._registry, self._name, self._alias)
        new_key = API_KEY_VARIABLE not in os.environ
        os.environ.setdefault(API_KEY_VARIABLE, secrets.token_urlsafe(32))
        with reserve_port(host, port) as public, suppress(KeyboardInterrupt):
            first = self._start(version)
            with first.stack:
                public.listen()  # a reader of the next line may send requests at once
                print(f"serving {self._name} at http://{reachable(host)}:{public.getsockname()[1]}/v1", flush=True)
                if new_key:
                    print(f"API key: {os.environ[API_KEY_VARIABLE]}", flush=True)
                asyncio.run(self._run(first, public))

    async def _run(self, serving: Serving, public: socket.socket) -> None:
        proxy = Proxy(Backend(serving.server.url))
        config = uvicorn.Config(
            proxy,
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=LAST_ANSWERS_TIMEOUT_S,
        )
        listening = asyncio.create_task(uvicorn.Server(config).serve(sockets=[public]))
        listening.add_done_callback(lambda _: self._stopping.set())
        try:
            while not listening.done():
                await asyncio.wait({listening}, timeout=POLL_INTERVAL_S)
                if not serving.server.alive():
                    raise serving.server.failure("ended by itself")
                if successor := await self._successor(serving):
                    former, serving = serving, successor
                    await self._hand_over(proxy, former, successor)
        finally:
            serving.stack.close()
            listening.cancel()

    async def _successor(self, serving: Serving) -> Serving | None:
        """The server of a new champion, healthy; None when there is none, or it cannot be served."""
        try:
            version = await asyncio.to_thread(self._registry.find, self._name, self._alias)
            if version is None or version.number in (serving.version.number, self._failed):
                return None
            say(f"version {version.number} of {self._name} is {self._alias} now; starting its server")
            return await asyncio.to_thread(self._start, version)
        except LifecycleError as error:
            trouble = f"still serving version {serving.version.number} of {self._name}: {error}"
            if trouble != self._last_trouble and not self._stopping.is_set():
                say(trouble)
            self._last_trouble = trouble
            return None

    async def _hand_over(self, proxy: Proxy, former: Serving, successor: Serving) -> None:
        backend = proxy.switch(Backend(successor.server.url))
        say(f"version {successor.version.number} of {self._name} is served")
        try:
            await backend.drained()
        finally:
            await asyncio.to_thread(former.stack.close)
        say(f"version {former.version.number} of {self._name} has answered its last request and was stopped")

    def _start(self, version: RegisteredVersion) -> Serving:
        """Start the server of a version and return when it is healthy and answers as it should."""
        folder = home() / "servers"
        folder.mkdir(parents=True, exist_ok=True)
        label = f"{self._name}-{version.number}"
        execution = ServeExecution()
        self._failed = version.number
        with ExitStack() as stack:
            spec = champions.launch_spec(version)
            runtime = folder / f"{label}-{os.getpid()}"
            server = stack.enter_context(started_server(spec, execution, folder / f"{label}.log", runtime))
            title = f"{server.engine.title} for version {version.number}"
            say(f"starting {title} of {self._name}; its log is {server.log_file}")
            server.wait_until_ready(execution.ready_timeout_s, self._reporter(title))
            server.check()
            self._failed = None
            return Serving(version, server, stack.pop_all())

    def _reporter(self, title: str) -> Callable[[float], None]:
        """Tells that a server is starting, until the one that is served is to stop."""
        tell = starting_lines(title)

        def report(elapsed_s: float) -> None:
            if self._stopping.is_set():
                raise RefreshStoppedError("the server was stopped while a new champion was starting")
            tell(elapsed_s)

        return report
