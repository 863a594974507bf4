"""Inference engines of registered model versions: start, check, watch, and end after the last response.

An adapter of a base that runs already is loaded into the running engine, and ends with it. Each version of an adapter
has a name of its own in its server, such as `adder@3`; the proxy knows it by the registered name. Before requests go to
an adapter, its log-probabilities are compared with those that training recorded. The reference is an adapter without
effect, since vLLM answers for the base itself only while a slot is empty.
"""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from flows.champion import champions
from flows.champion.registry import RegisteredVersion
from stages.adapters.headers import write_idle_adapter
from stages.core.errors import LifecycleError
from stages.core.lines import print_timed, starting_lines
from stages.core.process_tree import descendants, end_processes
from stages.serving.agreement import compare_with_records
from stages.serving.backend import Backend, Naming
from stages.serving.client import check_server
from stages.serving.config import ServeExecution
from stages.serving.engine import LaunchSpec
from stages.serving.server import Server, started_server
from stages.serving.tally import ServedVersion

WATCH_INTERVAL_S = 0.4
UNWELL = (502, 503)
"""Bad HTTP statuses of `/health`: 502, the engine does not answer the proxy; 503, vLLM's engine process ended."""
MAX_UNWELL = 2
"""Number of bad health answers in a row after which an engine counts as dead; its process may end only later."""
BUSY_S = 30.0
"""Longest wait, in seconds, to find out whether an engine that failed to load an adapter is busy or dead."""
T = TypeVar("T")


@dataclass(frozen=True)
class RunningVersion:
    """Served version with its engine, which ends when `stack` is closed; `died` is set once it ended by itself."""

    version: RegisteredVersion
    server: Server
    stack: ExitStack
    backend: Backend
    died: threading.Event = field(default_factory=threading.Event)
    began_s: float = field(default_factory=time.monotonic)

    @property
    def served(self) -> ServedVersion:
        """Return the served version's name and number, by which metrics count its requests."""
        return ServedVersion(self.version.name, self.version.number)


def start_engine(
    version: RegisteredVersion, folder: Path, is_begun: Callable[[Server], None] = lambda server: None
) -> RunningVersion:
    """Start an inference engine for a model version; return it once it is healthy and its answers are checked.

    folder: for the engines' temporary files; the log lies beside it. is_begun: called as soon as there is a process to
    stop.

    Raises what starting and checking raise, after removing everything.
    """
    label, execution = f"{version.name}-{version.number}", ServeExecution()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(dir=folder)))
        spec = swapping_spec(version, scratch / "idle")
        # The runtime path is short, because sockets are made there: their paths have at most 107 bytes.
        log_file, runtime = folder.parent / f"{label}.log", scratch.with_suffix(".run")
        server = stack.enter_context(started_server(spec, execution, log_file, runtime))
        # Raises if the start was stopped before there was a process to stop.
        is_begun(server)
        title = f"{server.engine.title} for version {version.number}"
        print_timed(f"starting {title} of {version.name}; its log is {server.log_file}")
        server.wait_until_ready(execution.ready_timeout_s, starting_lines(title))
        if spec.swaps_adapters:
            check_adapter(server, spec.served_name, spec.adapters[spec.served_name])
        else:
            server.check()
        died = _watched(server, stack)
        # From here on the engine lives as long as the `RunningVersion`; any error above has ended it.
        return RunningVersion(version, server, stack.pop_all(), _backend(server, version), died)


def load_adapter(version: RegisteredVersion, running: RunningVersion) -> RunningVersion | None:
    """Load an adapter into a running engine and check it; return None when the engine serves another base model.

    Raises what loading and checking raise; the engine is then as before, unless it has ended.
    """
    if not swap_in(running.server, version):
        return None
    return RunningVersion(version, running.server, running.stack, _backend(running.server, version), running.died)


def unload_adapter(former: RunningVersion) -> None:
    """Unload an adapter that gets no more requests; its engine goes on serving other adapters."""
    if former.died.is_set():
        return
    server, naming = former.server, former.backend.naming
    assert naming
    try:
        server.engine.unload_adapter(server.address, server.api_key, naming.inside, server.client.timeout_s)
    except LifecycleError as error:  # harmless: the proxy sends it no requests
        print_timed(f"version {former.version.number} of {former.version.name} stays loaded: {error}")


def end_serving(former: RunningVersion, is_shared: bool, is_over: threading.Event) -> None:
    """Stop a version after its last response: end its engine, or unload its adapter from a shared engine.

    is_shared: whether its engine goes on with another version. is_over: set when nothing is served any more.
    """
    while not former.backend.idle.wait(WATCH_INTERVAL_S):
        if is_over.is_set():
            break
    if is_shared:
        unload_adapter(former)
    else:
        former.stack.close()
    print_timed(
        f"version {former.version.number} of {former.version.name} has answered its last request and was stopped"
    )


def end_dead(serving: RunningVersion) -> None:
    """End the remaining processes of a dead engine at once, since requests wait for the next engine."""
    end_processes(lambda: descendants(serving.server.pid))
    serving.stack.close()


def _watched(server: Server, stack: ExitStack) -> threading.Event:
    """Return an event that is set a second after an engine died (busy ones live), watched until `stack` is closed."""
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
    return Backend(server.address, naming, ServedVersion(version.name, version.number), server.spec.limits)


def swapping_spec(version: RegisteredVersion, idle: Path) -> LaunchSpec:
    """Return a version's launch spec for a server that loads adapters while it runs; unchanged for a whole model.

    idle: path at which an adapter without effect is written.
    """
    spec = champions.launch_spec(version)
    if not spec.adapters:
        return spec
    naming, folder = naming_of(version), spec.adapters[version.name]
    write_idle_adapter(folder, idle)
    adapters = {naming.inside: folder, _idle_name(spec): idle}
    return spec.model_copy(update={"served_name": naming.inside, "adapters": adapters, "swaps_adapters": True})


def naming_of(version: RegisteredVersion) -> Naming:
    """Return the two names of an adapter version: the one that clients request, and the server's, such as `adder@3`."""
    return Naming(public=version.name, inside=f"{version.name}@{version.number}")


def swap_in(server: Server, version: RegisteredVersion) -> bool:
    """Load an adapter version into a running server and check it; return False if the server has another base.

    Raises what loading and checking raise; the server is then as before.
    """
    spec, running, naming = champions.launch_spec(version), server.spec, naming_of(version)
    # All but the adapters: base model, server options and engine.
    same_server = (spec.model, spec.serving, spec.engine) == (running.model, running.serving, running.engine)
    if not (running.swaps_adapters and spec.adapters and same_server):
        return False
    folder = spec.adapters[version.name]
    if not server.engine.has_room(running, folder):
        return False
    began_s = time.monotonic()
    server.engine.load_adapter(server.address, server.api_key, naming.inside, folder, server.client.timeout_s)
    try:
        check_adapter(server, naming.inside, folder)
    except LifecycleError:
        with suppress(LifecycleError):  # the first error is raised; a server that is gone has nothing to unload
            server.engine.unload_adapter(server.address, server.api_key, naming.inside, server.client.timeout_s)
        raise
    print_timed(
        f"version {version.number} of {version.name} was loaded and checked in {time.monotonic() - began_s:.2f} s"
    )
    return True


def check_adapter(server: Server, name: str, folder: Path) -> None:
    """Check that a server lists an adapter and has its recorded log-probabilities; else raise ServerError."""
    client = replace(server.client, model=name)
    check_server(client, server.engine.smoke_log_probabilities)
    spec = server.spec.model_copy(update={"adapters": {**server.spec.adapters, name: folder}})
    context_tokens = server.engine.context_tokens(client, spec)
    agreements = compare_with_records(
        client, spec, [name], context_tokens, print_timed, _idle_name(server.spec), address=server.address
    )
    for one in agreements.values():
        print_timed(
            f"{name} differs from what training recorded by {one.from_training.most:.2g} nats per token at most"
        )


def _idle_name(spec: LaunchSpec) -> str:
    return f"{spec.own_name}-idle"


class StartStoppedError(Exception):
    """Error of an engine start that was stopped on purpose, such as for a more urgent engine."""


class EngineStart:
    """Start of a model version in a thread: in an engine of its own, or as an adapter loaded into a running engine.

    Two engines that start at the same time disturb each other, since each measures the memory that is free; so a start
    waits first for `after`, the end of what was stopped. loads_into: the running engine, until it turns out to be that
    of another base. folder: as for `start_engine`.
    """

    def __init__(
        self,
        version: RegisteredVersion,
        running: RunningVersion | None,
        folder: Path,
        after: Iterable[Future[None]] = (),
    ):
        self.version = version
        self.loads_into = running
        self._folder = folder
        self._is_stopped = threading.Event()
        self._server: Server | None = None
        self.outcome: Future[RunningVersion] = in_background(lambda: self._run([*after]))
        """Future of the served version. `result()` raises a failed start's error, or StartStoppedError, cleaned up."""

    def stop(self) -> Future[None]:
        """Stop an inference engine that is starting; return a future that is done when nothing of it is left."""
        self._is_stopped.set()
        return in_background(self._end)

    def _run(self, after: list[Future[None]]) -> RunningVersion:
        wait(after)
        self._check()
        if running := self.loads_into:
            serving = self._loaded(running)
            if serving:
                return serving
            # The running engine has another base: this version needs an engine of its own.
            self.loads_into = None
            self._check()
        return start_engine(self.version, self._folder, self._is_begun)

    def _loaded(self, running: RunningVersion) -> RunningVersion | None:
        try:
            return load_adapter(self.version, running)
        except LifecycleError:
            # The adapter is to blame only if the engine lives, and a dying one is noticed late.
            give_up_s = time.monotonic() + BUSY_S
            while not running.server.client.is_healthy() and time.monotonic() < give_up_s:
                if running.died.wait(0.1):
                    break
            raise

    def _is_begun(self, server: Server) -> None:
        self._server = server
        self._check()

    def _check(self) -> None:
        if self._is_stopped.is_set():
            raise StartStoppedError

    def _end(self) -> None:
        if self._server:
            # The thread of `_run`, which waits for this engine, sees it dead and ends with an error.
            self._server.process.stop()
        wait([self.outcome])
        # It had become ready just before it was stopped.
        if not self.outcome.exception():
            self._discard(self.outcome.result())

    def _discard(self, serving: RunningVersion) -> None:
        if self.loads_into:
            unload_adapter(serving)
        else:
            serving.stack.close()


def in_background(call: Callable[[], T]) -> Future[T]:
    """Call a function in a daemon thread; return a future of its outcome."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # raised where the outcome is read
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome
