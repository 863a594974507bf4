"""Registered versions that are served: their engines started, checked, watched, and ended after the last answer.

An adapter of a base that runs already needs no engine of its own: it is loaded into the one that runs, and dies with
it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from flows.champion.adapters import check_adapter, naming_of, swap_in, swapping_spec
from flows.champion.registry import RegisteredVersion
from stages.core.errors import LifecycleError
from stages.core.supervisor import descendants, end_processes
from stages.serving.backend import Backend
from stages.serving.config import ServeExecution
from stages.serving.lines import say, starting_lines
from stages.serving.server import Server, started_server
from stages.serving.tally import ServedVersion

WATCH_INTERVAL_S = 0.4
UNWELL = (502, 503)
"""Answers of `/health`: of our proxy when the engine does not answer, of vLLM when its process that computes ended."""
MAX_UNWELL = 2
"""Such answers in a row, and the engine is taken for dead; its processes may take seconds longer to end."""


@dataclass(frozen=True)
class Serving:
    """A version and its engine, which ends when `stack` is closed. backend: what the proxy knows of it. died: set once
    the engine has ended by itself."""

    version: RegisteredVersion
    server: Server
    stack: ExitStack
    backend: Backend
    died: threading.Event = field(default_factory=threading.Event)
    began_s: float = field(default_factory=time.monotonic)

    @property
    def served(self) -> ServedVersion:
        """As metrics call it."""
        return ServedVersion(self.version.name, self.version.number)


def start_engine(
    version: RegisteredVersion, folder: Path, is_begun: Callable[[Server], None] = lambda server: None
) -> Serving:
    """Start an engine for a version; returns it healthy and checked.

    folder: for the temporary files of this process's engines; the log lies beside it. is_begun: called with the server
    as soon as it has a process that can be stopped.

    Raises what starting and checking raise; nothing is left then.
    """
    label, execution = f"{version.name}-{version.number}", ServeExecution()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(dir=folder)))
        spec = swapping_spec(version, scratch / "idle")
        log_file, runtime = folder.parent / f"{label}.log", scratch.with_suffix(".run")  # short: sockets are made there
        server = stack.enter_context(started_server(spec, execution, log_file, runtime))
        is_begun(server)
        title = f"{server.engine.title} for version {version.number}"
        say(f"starting {title} of {version.name}; its log is {server.log_file}")
        server.wait_until_ready(execution.ready_timeout_s, starting_lines(title))
        if spec.swaps_adapters:
            check_adapter(server, spec.served_name, spec.adapters[spec.served_name])
        else:
            server.check()
        died = _watched(server, stack)
        return Serving(version, server, stack.pop_all(), _backend(server, version), died)


def load_adapter(version: RegisteredVersion, running: Serving) -> Serving | None:
    """Load an adapter into a running engine; returns it checked, or None when that is not the engine of its base.

    Raises what loading and checking raise; the engine is as it was before then, unless it has ended.
    """
    if not swap_in(running.server, version):
        return None
    return Serving(version, running.server, running.stack, _backend(running.server, version), running.died)


def unload_adapter(former: Serving) -> None:
    """Unload a version that gets no requests any more from the engine that goes on with others."""
    if former.died.is_set():
        return
    server, naming = former.server, former.backend.naming
    assert naming
    try:
        server.engine.unload_adapter(server.address, server.api_key, naming.inside, server.client.timeout_s)
    except LifecycleError as error:  # it is not asked for any more
        say(f"version {former.version.number} of {former.version.name} stays loaded: {error}")


def end_serving(former: Serving, is_shared: bool, is_over: threading.Event) -> None:
    """Wait for the last answer of a version that gets no requests any more; then end its engine, or unload it.

    is_shared: whether its engine goes on with another version. is_over: set when nothing is served any more.
    """
    while not former.backend.idle.wait(WATCH_INTERVAL_S):
        if is_over.is_set():
            break
    if is_shared:
        unload_adapter(former)
    else:
        former.stack.close()
    say(f"version {former.version.number} of {former.version.name} has answered its last request and was stopped")


def end_dead(serving: Serving) -> None:
    """End what is left of an engine that died. Without the seconds that processes get to end by themselves, since
    requests wait for the next one."""
    end_processes(lambda: descendants(serving.server.pid))
    serving.stack.close()


def _watched(server: Server, stack: ExitStack) -> threading.Event:
    """Return an event that is set once an engine has ended by itself, within about a second. Watches until `stack` is
    closed; one that is only busy gives no answer, or a good one."""
    died, is_closed = threading.Event(), threading.Event()

    def watch() -> None:
        num_unwell = 0
        while not is_closed.wait(WATCH_INTERVAL_S):
            num_unwell = num_unwell + 1 if server.client.health_status() in UNWELL else 0
            if num_unwell >= MAX_UNWELL or not server.alive():
                died.set()
                return

    threading.Thread(target=watch, name="watch", daemon=True).start()
    stack.callback(is_closed.set)
    return died


def _backend(server: Server, version: RegisteredVersion) -> Backend:
    naming = naming_of(version) if server.spec.swaps_adapters else None
    return Backend(server.address, naming, ServedVersion(version.name, version.number))
