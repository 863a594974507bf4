"""Registered versions that are served: their servers started, checked, and ended after the last answer.

An adapter of a base that runs already needs no server of its own: it is loaded into the one that runs.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from flows.champion.adapters import check_adapter, naming_of, swap_in, swapping_spec
from flows.champion.registry import RegisteredVersion
from flows.ledger.home import home
from stages.core.errors import LifecycleError
from stages.serving.backend import Backend
from stages.serving.config import ServeExecution
from stages.serving.lines import say, starting_lines
from stages.serving.server import Server, started_server
from stages.serving.tally import ServedVersion

BUSY_S = 30.0


@dataclass(frozen=True)
class Serving:
    """A version and its server, which ends when `stack` is closed. backend: what the proxy knows of it."""

    version: RegisteredVersion
    server: Server
    stack: ExitStack
    backend: Backend

    @property
    def served(self) -> ServedVersion:
        """As metrics call it."""
        return ServedVersion(self.version.name, self.version.number)


def begin_serving(version: RegisteredVersion, running: Serving | None, servers: ExitStack) -> Serving:
    """A server of a version, healthy and answering as it should: the one that runs, for an adapter of its base, or a
    new one, which ends with `servers` at the latest.

    Raises what starting, loading and checking raise; what runs is as it was before then.
    """
    if running and swap_in(running.server, version):
        return Serving(version, running.server, running.stack, _backend(running.server, version))
    return _start(version, servers)


def end_serving(former: Serving, staying: Serving) -> None:
    """Wait for the last answer of a version that gets no requests any more; then end its server, or unload it."""
    former.backend.idle.wait()
    if former.server is staying.server:
        _unload(former)
    else:
        former.stack.close()
    say(f"version {former.version.number} of {former.version.name} has answered its last request and was stopped")


def is_gone(server: Server) -> bool:
    """Whether a server that did not answer has ended; one that is only busy answers within some seconds."""
    give_up_s = time.monotonic() + BUSY_S
    while server.alive() and not server.client.is_healthy() and time.monotonic() < give_up_s:
        time.sleep(0.1)
    return not server.alive()


def _start(version: RegisteredVersion, servers: ExitStack) -> Serving:
    folder = home() / "servers"
    folder.mkdir(parents=True, exist_ok=True)
    label = f"{version.name}-{version.number}"
    execution = ServeExecution()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix=f"{label}-", dir=folder)))
        spec = swapping_spec(version, scratch / "idle")
        runtime = folder / f"{label}-{os.getpid()}"
        server = stack.enter_context(started_server(spec, execution, folder / f"{label}.log", runtime))
        title = f"{server.engine.title} for version {version.number}"
        say(f"starting {title} of {version.name}; its log is {server.log_file}")
        server.wait_until_ready(execution.ready_timeout_s, starting_lines(title))
        if spec.swaps_adapters:
            check_adapter(server, spec.served_name, spec.adapters[spec.served_name])
        else:
            server.check()
        return Serving(version, server, servers.enter_context(stack.pop_all()), _backend(server, version))


def _backend(server: Server, version: RegisteredVersion) -> Backend:
    naming = naming_of(version) if server.spec.swaps_adapters else None
    return Backend(server.address, naming, ServedVersion(version.name, version.number))


def _unload(former: Serving) -> None:
    server, naming = former.server, former.backend.naming
    assert naming
    try:
        server.engine.unload_adapter(server.address, server.api_key, naming.inside, server.client.timeout_s)
    except LifecycleError as error:  # it is not asked for any more; a server that is gone is seen at the next look
        say(f"version {former.version.number} of {former.version.name} stays loaded: {error}")
