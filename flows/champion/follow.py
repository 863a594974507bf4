"""Serves the present champion: `lifecycle serve models:/NAME@champion --follow`.

A proxy listens on the public port; behind it stands the server of the present champion. When the alias moves, a
second server is started; once that is healthy, new requests go there, and the first one ends after its last answer.
For that time, the device must have room for both. An adapter of the same base needs no second server: it is loaded into
the one that runs, and the former one is unloaded after its last answer.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from flows.champion import champions
from flows.champion.adapters import check_adapter, naming_of, swap_in, swapping_spec
from flows.champion.registry import RegisteredVersion, Registry
from flows.ledger.home import home
from stages.core.errors import LifecycleError, TransientError
from stages.serving.config import ServeExecution
from stages.serving.lines import say, starting_lines
from stages.serving.listening import listening
from stages.serving.proxy import API_KEY_VARIABLE, Naming, Proxy
from stages.serving.server import Server, listening_socket, reachable, started_server

POLL_INTERVAL_S = 5.0
LAST_ANSWERS_TIMEOUT_S = 30
BUSY_S = 30.0


@dataclass(frozen=True)
class Serving:
    """A champion and its server, which ends when `stack` is closed. naming: of an adapter."""

    version: RegisteredVersion
    server: Server
    stack: ExitStack
    naming: Naming | None


class Follower:
    """Serves the version that an alias of a registered model points to, until it is interrupted."""

    def __init__(self, registry: Registry, name: str, alias: str):
        self._registry = registry
        self._name = name
        self._alias = alias
        self._servers = ExitStack()
        self._failed: str | None = None
        self._last_trouble: str | None = None

    def serve(self, host: str, port: int | None) -> None:
        """Raises StoreError when there is no champion, ResourceError for a taken port, ServerError for a server that
        does not start, or ends by itself."""
        version = champions.find(self._registry, self._name, self._alias)
        new_key = API_KEY_VARIABLE not in os.environ
        key = os.environ.setdefault(API_KEY_VARIABLE, secrets.token_urlsafe(32))
        with suppress(KeyboardInterrupt), listening_socket(host, port) as public, self._servers:
            serving = self._start(version)
            proxy = Proxy(serving.server.address, key, serving.naming)
            with listening(proxy, public, LAST_ANSWERS_TIMEOUT_S):
                print(f"serving {self._name} at http://{reachable(host)}:{public.getsockname()[1]}/v1", flush=True)
                if new_key:
                    print(f"API key: {key}", flush=True)
                while True:
                    serving = self._present(serving, proxy)

    def _present(self, serving: Serving, proxy: Proxy) -> Serving:
        """What is served after the next look at the alias: the same as before, or its successor."""
        time.sleep(POLL_INTERVAL_S)
        if not serving.server.alive():
            raise serving.server.failure("ended by itself")
        successor = self._successor(serving)
        if successor is None:
            return serving
        before = proxy.switch(successor.server.address, successor.naming)
        say(f"version {successor.version.number} of {self._name} is served")
        before.idle.wait()
        if successor.server is serving.server:
            self._unload(serving)
        else:
            serving.stack.close()
        say(f"version {serving.version.number} of {self._name} has answered its last request and was stopped")
        return successor

    def _unload(self, serving: Serving) -> None:
        assert serving.naming
        server = serving.server
        try:
            server.engine.unload_adapter(server.address, server.api_key, serving.naming.inside, server.client.timeout_s)
        except LifecycleError as error:  # it is not asked for any more; a server that is gone is seen at the next look
            say(f"version {serving.version.number} of {self._name} stays loaded: {error}")

    def _successor(self, serving: Serving) -> Serving | None:
        """The server of a new champion, healthy; None when there is none, or it cannot be served."""
        try:
            version = self._registry.find(self._name, self._alias)
            if version is None or version.number != self._failed:
                self._failed = None  # an alias that is moved away and back asks for another try
            if version is None or version.number in (serving.version.number, self._failed):
                return None
            say(f"version {version.number} of {self._name} is {self._alias} now")
            self._failed = version.number
            if swap_in(serving.server, version):
                self._failed = None
                return replace(serving, version=version, naming=naming_of(version))
            return self._start(version)
        except LifecycleError as error:
            if isinstance(error, TransientError) and _is_gone(serving.server):
                doing = f"ended while it was to load another version of {self._name}, and nothing is served"
                raise serving.server.failure(doing) from error
            trouble = (
                f"still serving version {serving.version.number} of {self._name}: {error}\n"
                f"it is tried again when {self._alias} has been moved away and back"
            )
            if trouble != self._last_trouble:
                say(trouble)
            self._last_trouble = trouble
            return None

    def _start(self, version: RegisteredVersion) -> Serving:
        """Start the server of a version and return when it is healthy and answers as it should."""
        folder = home() / "servers"
        folder.mkdir(parents=True, exist_ok=True)
        label = f"{self._name}-{version.number}"
        execution = ServeExecution()
        self._failed = version.number
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(TemporaryDirectory(prefix=f"{label}-", dir=folder)))
            spec = swapping_spec(version, scratch / "idle")
            runtime = folder / f"{label}-{os.getpid()}"
            server = stack.enter_context(started_server(spec, execution, folder / f"{label}.log", runtime))
            title = f"{server.engine.title} for version {version.number}"
            say(f"starting {title} of {self._name}; its log is {server.log_file}")
            server.wait_until_ready(execution.ready_timeout_s, starting_lines(title))
            if spec.swaps_adapters:
                check_adapter(server, spec.served_name, spec.adapters[spec.served_name])
            else:
                server.check()
            self._failed = None
            naming = naming_of(version) if spec.swaps_adapters else None
            return Serving(version, server, self._servers.enter_context(stack.pop_all()), naming)


def _is_gone(server: Server) -> bool:
    """Whether a server that did not answer has ended; one that is only busy answers within some seconds."""
    give_up_s = time.monotonic() + BUSY_S
    while server.alive() and not server.client.is_healthy() and time.monotonic() < give_up_s:
        time.sleep(0.1)
    return not server.alive()
