"""Start, readiness check and stop of model servers; a server never outlives the process that started it.

From a `LaunchSpec` comes a `Server` whose processes, port and temporary files are gone however its context ends.
"""

import contextlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from stages.core.errors import LifecycleError, ResourceError, ServerError
from stages.core.supervised import SupervisedProcess, was_killed
from stages.models.model_folder import check_model_folder
from stages.serving.backend import Backend, EngineAddress
from stages.serving.client import Client, check_server
from stages.serving.config import ServeExecution
from stages.serving.engine import Engine, LaunchSpec, WeightConnection
from stages.serving.people import People
from stages.serving.proxy import API_KEY_VARIABLE, MAX_CONNECTIONS, Proxy, listening
from stages.serving.registry import check_sees, check_weight_files, engine_of
from stages.serving.tally import ServedVersion

POLL_INTERVAL_S = 0.1
REPORT_INTERVAL_S = 1.0
GRACE_S = 5.0
SOCKET_NAME = "engine.sock"


@dataclass
class Server:
    """Started model server; call `wait_until_ready` before the first request.

    client: speaks to the proxy. address: of the engine itself, for another proxy of this process.
    """

    client: Client
    engine: Engine
    address: EngineAddress
    spec: LaunchSpec
    log_file: Path
    process: SupervisedProcess
    started_s: float
    was_ready: bool = False
    """True once the server has answered a health check."""
    connection: WeightConnection | None = None
    """Connection by which it gets a training's new weights; None where it gets none, or by folders."""

    @property
    def url(self) -> str:
        """URL of the server's proxy, without `/v1`."""
        return self.client.url

    @property
    def api_key(self) -> str:
        return self.client.api_key

    @property
    def pid(self) -> int:
        """Process id of the supervisor process; ending that process ends the server."""
        return self.process.pid

    def alive(self) -> bool:
        """Return whether the engine's process still runs, ready or not."""
        return self.process.alive()

    def wait_until_ready(self, timeout_s: float, report: Callable[[float], None] = lambda elapsed_s: None) -> float:
        """Wait until the server passes its health check; return the seconds since its start.

        report: gets the elapsed seconds, once a second. Raises ServerError, with the log's cause, for a dead or late
        server.
        """
        reported_s = 0.0
        while (elapsed_s := time.monotonic() - self.started_s) < timeout_s:
            if not self.alive():
                raise self.failure("ended before it was ready")
            if self.client.is_healthy():
                self.was_ready = True
                return time.monotonic() - self.started_s
            if elapsed_s >= reported_s + REPORT_INTERVAL_S:
                report(reported_s := elapsed_s)
            time.sleep(POLL_INTERVAL_S)
        raise self.failure(f"was not ready within {timeout_s:g} s")

    def check(self) -> None:
        """Raise ServerError unless the server lists its model and generates finite log-probabilities.

        Some engines start with a model that they cannot run, and die of the first request: their logs give the reason.
        """
        try:
            check_server(self.client, self.engine.smoke_log_probabilities)
        except LifecycleError as error:
            if self.client.is_healthy():
                raise
            raise self.failure(f"failed at its first request ({error})") from error

    def failure(self, what: str) -> ServerError:
        """Return an error with the cause of the server's failure, from its log; waits a few seconds for its end.

        It died if a signal ended it, or if its log has no cause: then one of its processes was killed, a signal that
        only its parent sees, and the others have ended by themselves.
        """
        deadline_s = time.monotonic() + GRACE_S
        while (exit_code := self.process.poll()) is None and time.monotonic() < deadline_s:
            time.sleep(POLL_INTERVAL_S)
        # The end of the log may be quoted below, and must not show the key.
        log = self.log_file.read_text(errors="replace").replace(self.api_key, "***")
        cause = self.engine.root_cause(log)
        ends_with = f"its log ends with:\n{last_lines(log)}"
        died = exit_code is not None and (was_killed(exit_code) or cause is None)
        return ServerError(
            f"the {self.engine.title} server for {self.spec.served_name} ({self.spec.model}) {what}: "
            f"{cause or ends_with}\nthe whole log is {self.log_file}",
            died=died,
        )


@contextlib.contextmanager
def started_server(
    spec: LaunchSpec,
    execution: ServeExecution,
    log_file: Path,
    runtime: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
    version: str | None = None,
    people: People | None = None,
) -> Iterator[Server]:
    """Start a server for a launch spec: the engine, and in front of it a proxy at the address in `execution`.

    On leaving, no process, port or temporary file is left. The API key is VLLM_API_KEY of our environment, or a new
    one. log_file: receives the engine's output. runtime: folder for its socket and temporary files, emptied first and
    removed in the end. environment: variables that override the engine's. version: of a registered model, for the
    metrics. people: those with keys of their own. Raises at once, before anything slow: ModelError for a missing or
    damaged folder, or an adapter that the engine could not put on the model; ResourceError when the port is taken or
    the engine is not installed.
    """
    check_model_folder(spec.facts)
    engine = engine_of(spec.engine)
    check_weight_files(spec.model, engine)
    check_sees(spec.model, engine, spec.adapters)
    if spec.adapters:
        engine.check_adapters(spec)
    program = engine.find_program()
    with (
        listening_socket(execution.host, execution.port) as public,
        _emptied(runtime),
        _engine_address(engine, runtime) as (inside, outside),
    ):
        url = f"http://{reachable(execution.host)}:{public.getsockname()[1]}"
        client = Client(url, api_key(), spec.served_name)
        command = program.server_command(spec, inside)
        # Servers leave files in their temporary folder even after a clean stop.
        of_engine = {
            **program.server_environment(spec, client.api_key),
            "TMPDIR": str(runtime.resolve()),
            **environment,
        }
        with log_file.open("wb") as output:
            process = SupervisedProcess(command, environment=of_engine, output=output, folder=runtime, grace_s=GRACE_S)
        # The proxy answers while the engine starts, so that early requests get an error instead of no connection.
        try:
            served = ServedVersion(spec.served_name, version) if version else None
            backend = Backend(outside, version=served, limits=spec.limits)
            with listening(Proxy(backend, client.api_key, people=people), public):
                yield Server(client, engine, outside, spec, log_file, process, time.monotonic())
        finally:
            process.stop()  # after the proxy, so that answers under way can end


def api_key() -> str:
    """Return the API key for servers of this refresh: VLLM_API_KEY if it is set, else a new random one."""
    return os.environ.get(API_KEY_VARIABLE) or secrets.token_urlsafe(32)


@contextlib.contextmanager
def _emptied(folder: Path) -> Iterator[None]:
    """Create an empty folder that only this user can read, and remove it when the context ends."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _engine_address(engine: Engine, runtime: Path) -> Iterator[tuple[EngineAddress, EngineAddress]]:
    """Provide an engine's address for its process, which is relative to the folder, and for ours."""
    if not engine.listens_on_sockets:
        with socket.socket() as reservation:
            # While bound, the kernel gives the port to no one else; with SO_REUSEADDR, the engine can bind it too.
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reservation.bind(("127.0.0.1", 0))
            address = EngineAddress(port=reservation.getsockname()[1])
            yield address, address
        return
    with _opened(runtime) as folder:
        yield EngineAddress(Path(SOCKET_NAME)), EngineAddress(folder / SOCKET_NAME)


@dataclass(frozen=True)
class ReachedEngine:
    """Engine of a running server, reached itself instead of through its proxy."""

    engine: Engine
    address: EngineAddress


@contextlib.contextmanager
def reached_engine(engine: Engine, runtime: Path | None) -> Iterator[ReachedEngine | None]:
    """Provide an engine that another process started; None if its socket is not there, as on another machine."""
    if runtime is None or not (runtime / SOCKET_NAME).exists():
        yield None
        return
    with _opened(runtime) as folder:
        yield ReachedEngine(engine, EngineAddress(folder / SOCKET_NAME))


@contextlib.contextmanager
def _opened(runtime: Path) -> Iterator[Path]:
    """Provide a short name of a folder, which is valid in this process: a socket's path has 107 bytes."""
    folder = os.open(runtime, os.O_PATH | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{folder}")
    finally:
        os.close(folder)


def last_lines(log: str, num_lines: int = 5) -> str:
    """Return the last lines of a server's log, for errors whose cause is unknown."""
    written = [line for line in log.splitlines() if line.strip()]
    return "\n".join(written[-num_lines:]) or "(the log is empty)"


def listening_socket(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens on `port`, or with None on a free one; raise ResourceError if it is taken.

    Open it before anything slow: from then on no other process can be taken for our server, and early clients wait. A
    socket that is only bound would lose the port to the first process that listens.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        public = socket.socket(family, socket.SOCK_STREAM)
        try:
            public.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections may linger there
            public.bind((host, port or 0))
            public.listen(MAX_CONNECTIONS)
        except OSError:
            public.close()
            raise
    except OSError as error:
        raise ResourceError(
            f"cannot listen on {host}:{port or '(any port)'}: {error.strerror}; "
            "stop what listens there, or choose another execution.port (or none, for a free one)"
        ) from error
    return public


def reachable(host: str) -> str:
    """Return the address by which this machine reaches a server on `host`, such as 127.0.0.1 for 0.0.0.0."""
    own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 (compared, not bound)
    return f"[{own}]" if ":" in own else own
