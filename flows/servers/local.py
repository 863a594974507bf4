"""Local Prefect and MLflow servers and the worker for scheduled refreshes: start, find, check and stop them.

A server that the user named (`PREFECT_API_URL`, `MLFLOW_TRACKING_URI`) is used and checked, never started or stopped.
"""

import base64
import hashlib
import importlib.metadata
import json
import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

from filelock import FileLock, Timeout

from flows.ledger.home import home
from flows.ledger.process_identity import ProcessIdentity
from flows.ledger.refreshes import RunningRefreshes
from flows.servers import copied, supervisor
from flows.servers.keyed import KEY_FILE_VARIABLE, USER, client_settings, key_file, make_key
from flows.servers.lock import Lock
from flows.servers.programs import (
    KEY_VARIABLE,
    MLFLOW,
    NO_TELEMETRY,
    PREFECT,
    PREFECT_DATABASE,
    SERVERS,
    WORKER,
    ServerProgram,
    listener,
    used_servers,
)
from flows.servers.records import (
    ServerRecord,
    has_restored_database,
    host_of,
    is_unsettled_copy,
    read_records,
    write_records,
)
from flows.servers.supervised_commands import HandOver, SupervisedCommand
from stages.core.errors import ServerError
from stages.core.files import read_end
from stages.core.lines import say
from stages.core.process_tree import TOKEN_VARIABLE, end_processes, marked_processes, send, started_ticks, wait_for_end
from stages.core.redaction import quoted

START_TIMEOUT_S = 300.0
RESTART_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
LOG_END_BYTES = 8192
MANY_DEATHS = 5
ANSWER_TIMEOUT_S = 5.0
ANSWER_BYTES = 2**20


@dataclass(frozen=True)
class ServerStatus:
    """Status of the Prefect server, the MLflow server or the worker, as `lifecycle status` prints it.

    ours: started here, so that `down` stops it. needed: a refresh cannot do without it; the worker, once it was
    started. host: where it runs, if that cannot be seen from here. trouble: what a person should know even if it is
    healthy now.
    """

    name: str
    url: str | None
    healthy: bool
    ours: bool
    needed: bool = True
    pid: int | None = None
    host: str | None = None
    trouble: str = ""


@dataclass(frozen=True)
class Endpoints:
    """Addresses of Prefect and MLflow for refreshes. local: those under LIFECYCLE_HOME, which require `password`.

    mlflow_tracking_uri: None in a home without MLflow.
    """

    prefect_api_url: str
    mlflow_tracking_uri: str | None
    local: tuple[str, ...]
    password: str = field(repr=False)

    def environment(self) -> dict[str, str]:
        """Return the environment variables with which Prefect and MLflow clients reach the servers."""
        settings = {
            **NO_TELEMETRY,
            "PREFECT_API_URL": self.prefect_api_url,
            **({"MLFLOW_TRACKING_URI": self.mlflow_tracking_uri} if self.mlflow_tracking_uri else {}),
        }
        for server in self.local:
            settings |= client_settings(server, self.password)
        return settings


def up(*, worker: bool = False) -> Endpoints:
    """Start the Prefect and MLflow servers, and if asked to the worker, unless they run; return their addresses.

    The worker comes with the supervisor, which restarts what dies and, if it runs, is given a minute for that. Raises
    `ServerError` when a server that the user named does not answer, or one of ours does not start.
    """
    used = used_servers()
    named = {program.name: url for program in used if (url := program.named())}
    for program in used:
        if program.name in named:
            _check_named(program, named[program.name])
    # One `up` or `down` at a time; the records read below stay true until it is released.
    with _lock():
        records = read_records()
        # Those that this home starts itself; a home may have one of its own beside one that the user named.
        ours = [program for program in used if program.name not in named]
        _refuse_elsewhere({program.name: records[program.name] for program in ours if program.name in records})
        former = records.get(WORKER.name)
        # A worker whose home was moved runs refreshes at the old path: it is replaced, even if only servers are wanted.
        worker = worker or bool(former and former.process.alive() and not former.knows_home)
        is_copy = is_unsettled_copy()
        if is_copy:
            key_file().unlink(missing_ok=True)  # the key belongs to the original
        password = make_key()
        lock = Lock(home())
        # A look only: the running supervisor keeps the lock, and everything goes on, if nothing has to be changed.
        is_supervised = lock.holder() is not None
        if is_supervised:
            _await_supervised([*ours, WORKER] if worker else ours, lock)
        records, settings = read_records(), {KEY_VARIABLE: password}
        # One that runs with another key, or without any, as earlier versions started it, is started again.
        absent = [program for program in ours if not _runs_with(program, records, settings)]
        if not absent and not is_copy:
            endpoints = _endpoints(named, records, password)
            if not worker or (is_supervised and _runs_with(WORKER, records, endpoints.environment())):
                return endpoints
        # From here on nothing restarts what dies, until a supervisor is started below.
        plan = _take(lock) if worker or is_supervised else HandOver()
        records, kept = read_records(), {one.name: one for one in plan.kept}
        try:
            _start(absent, records, settings, kept)
            endpoints = _endpoints(named, records, password)
            if is_copy:
                _settle(records, endpoints)
            if worker:
                _start_worker(records, endpoints.environment(), kept)
                kept.setdefault(WORKER.name, _adopted(WORKER, records[WORKER.name], endpoints.environment()))
        # Also after a failed start: what runs already must not be left without a supervisor.
        finally:
            # No supervisor: the servers have inherited their sockets, and this process needs its copies no more.
            if plan.lock is None:
                _close(kept.values())
            else:
                # Servers that run unsupervised since an earlier `up`; no supervisor has their sockets.
                others = [program for program in ours if program.name in records and program.name not in kept]
                adopted = [_adopted(program, records[program.name], settings) for program in others]
                supervisor.start(HandOver([*kept.values(), *adopted], str(home()), plan.lock))
    return endpoints


def down() -> list[str]:
    """Stop all servers and the worker, with their child processes; return their names.

    The supervisor goes first, or it would restart what ends; then the worker, whose refreshes still report to the
    servers.
    """
    with _lock():
        _refuse_elsewhere(read_records())
        plan = _take(Lock(home()))
        _close(plan.kept)
        records = read_records()
        if WORKER.name in records:
            _stop_refreshes(records[WORKER.name])
            _stop([records[WORKER.name]])
        _stop(records.values())
        if records:
            write_records({})
        plan.release()
    return [name for name, record in records.items()]


def supervise() -> NoReturn:
    """Turn this process into the running servers' supervisor, which restarts them. Raises `ServerError`."""
    with _lock():
        supervisor.become(_take(Lock(home())))


def revive_supervisor() -> None:
    """Restart the servers' supervisor if it has died; the worker does this, since it has its environment."""
    if Lock(home()).holder() is not None:
        return
    # Without waiting: `up` or `down` may hold it, which see to the supervisor themselves.
    with suppress(Timeout), _lock().acquire(timeout=0):
        records = read_records()
        # This worker has been replaced, and the one that is recorded calls this itself.
        if WORKER.name not in records or records[WORKER.name].process != ProcessIdentity.own():
            return
        settings = {KEY_VARIABLE: make_key()}
        kept = [
            _adopted(program, records[program.name], settings)
            for program in SERVERS
            # The worker's environment names every server: those with the recorded address are ours.
            if program.name in records and program.named() == records[program.name].address + program.client_path
        ]
        # No settings: the worker's environment, which is inherited, has the addresses and the key already.
        worker = _adopted(WORKER, records[WORKER.name], {})
        supervisor.start(HandOver([*kept, worker], str(home()), _take(Lock(home())).lock))


def status() -> list[ServerStatus]:
    """Return the address and health of the Prefect server, the MLflow server and the worker."""
    records = read_records()
    return [_status_of(program, records.get(program.name)) for program in (*used_servers(), WORKER)]


def is_answering(url: str, timeout_s: float = ANSWER_TIMEOUT_S) -> bool:
    """Return whether an HTTP server answers a GET request with success."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:  # noqa: S310 (http addresses only)
            return bool(response.status < 400)
    except (OSError, ValueError):
        return False


def _status_of(program: ServerProgram, record: ServerRecord | None) -> ServerStatus:
    named = program.named()
    if named:
        return ServerStatus(program.name, named, _named_answers(program, named), ours=False)
    host = host_of(record) if record else None
    trouble = _trouble(program, record) if record and not host else ""
    if record is None or not record.process.alive():
        needed = program in SERVERS or record is not None
        return ServerStatus(program.name, None, healthy=False, ours=True, needed=needed, host=host, trouble=trouble)
    healthy = is_answering(record.address + program.health_path)
    return ServerStatus(program.name, record.address, healthy, ours=True, pid=record.process.pid, trouble=trouble)


def _trouble(program: ServerProgram, record: ServerRecord) -> str:
    """Return a problem of a server that its health check does not show, such as repeated deaths; "" for none."""
    log = home() / program.name / "server.log"
    if record.deaths >= MANY_DEATHS:
        last = quoted("".join(read_end(log, LOG_END_BYTES).splitlines()[-1:]), 200)
        return f"it has died {record.deaths} times in a row and is started again; {log} ends with: {last}"
    if program is WORKER and Lock(home()).holder() is None:
        return "no supervisor runs, so that nothing starts again what dies; `lifecycle up` starts it"
    return ""


def _refuse_elsewhere(records: Mapping[str, ServerRecord]) -> None:
    """Raise `ServerError` when a server of this home runs on another host or in another container.

    They would write to the same databases of SQLite, and could not be stopped from here.
    """
    hosts = {name: host for name, record in records.items() if (host := host_of(record))}
    if hosts:
        found = ", ".join(f"{name} on {host}" for name, host in hosts.items())
        raise ServerError(
            f"using the local servers of {home()}: {found}, which is another host, boot or container than this one; "
            "call `lifecycle down` there, or name servers for all of them (PREFECT_API_URL, MLFLOW_TRACKING_URI). One "
            "that has died is forgotten ten minutes after its last sign of life"
        )


def _settle(records: Mapping[str, ServerRecord], endpoints: Endpoints) -> None:
    """Pause the schedules that a copied lifecycle home has from its original, and print their names."""
    paused: list[str] = []
    if PREFECT.name in endpoints.local and (not os.environ.get(PREFECT_DATABASE) or has_restored_database()):
        paused = copied.stop_copied_runs(endpoints.prefect_api_url, endpoints.password)
    write_records(records, settled=True)
    resume = "; `lifecycle schedules resume NAME` has this home run one, too" if paused else ""
    schedules = f", and its schedules are paused: {', '.join(paused)}{resume}" if paused else ""
    say(f"{home()} is a copy of another home: its servers have a key of their own{schedules}", sys.stderr)


def _check_named(program: ServerProgram, url: str) -> None:
    if not _named_answers(program, url):
        raise ServerError(
            f"reaching the {program.name} server that {program.variable} names: {url} does not answer within "
            f"{ANSWER_TIMEOUT_S:.0f} s; start it, correct {program.variable}, or unset it to use a local server"
        )
    if program is PREFECT and _refuses_us(url):  # without MLflow a refresh runs, and is tracked later
        raise ServerError(
            f"reaching the Prefect server that {program.variable} names: {url} asks for another key than "
            f"PREFECT_API_AUTH_STRING; name the file that holds it, {USER}:PASSWORD, as {KEY_FILE_VARIABLE}"
        )


def _refuses_us(url: str) -> bool:
    import httpx  # takes 0.1 s, and most servers are ours

    from stages.remote.http import Expected, ask_httpx, httpx_client

    credentials = base64.b64encode(os.environ.get("PREFECT_API_AUTH_STRING", "").encode()).decode()
    expected = Expected(url, ANSWER_BYTES, ANSWER_TIMEOUT_S)
    try:
        with httpx_client(headers={"Authorization": f"Basic {credentials}"}) as client:
            return ask_httpx(client, expected, "GET", f"{url.rstrip('/')}/admin/version").status in (401, 403)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ServerError):
        return False


def _named_answers(program: ServerProgram, url: str) -> bool:
    """Return whether the user's own server answers; an address that is not HTTP counts as answering."""
    if not url.startswith(("http://", "https://")):
        return True
    return is_answering(url.rstrip("/").removesuffix(program.client_path) + program.health_path)


def _runs_with(program: ServerProgram, records: Mapping[str, ServerRecord], settings: Mapping[str, str]) -> bool:
    record = records.get(program.name)
    # The digest contains this program's version, too: after an upgrade nothing runs as wanted.
    as_wanted = bool(record and record.process.alive() and record.settings == _digest(settings) and record.knows_home)
    return as_wanted and is_answering(records[program.name].address + program.health_path)


def _await_supervised(programs: list[ServerProgram], lock: Lock) -> None:
    """Wait some seconds until servers that died once answer again, since the supervisor restarts them."""
    end_s = time.monotonic() + RESTART_TIMEOUT_S
    while lock.holder() is not None and time.monotonic() < end_s:
        records = read_records()
        started = [(records[program.name], program) for program in programs if program.name in records]
        # One that died twice has to wait for its pause, and is started by the caller.
        if all(record.deaths > 1 or is_answering(record.address + program.health_path) for record, program in started):
            return
        time.sleep(0.2)


def _endpoints(named: Mapping[str, str], records: Mapping[str, ServerRecord], password: str) -> Endpoints:
    urls = {
        program.name: named.get(program.name) or records[program.name].address + program.client_path
        for program in used_servers()
    }
    return Endpoints(
        prefect_api_url=urls[PREFECT.name],
        mlflow_tracking_uri=urls.get(MLFLOW.name),
        local=tuple(name for name in urls if name not in named),
        password=password,
    )


def _take(lock: Lock) -> HandOver:
    """Take the supervisor's lock and supervised commands. Raises ServerError when another machine holds it."""
    plan = lock.take()
    if plan is None:
        raise ServerError(
            f"taking {lock.path}: the servers of this home are supervised on another machine or in another container; "
            "run this there, or name servers that all share (PREFECT_API_URL, MLFLOW_TRACKING_URI)"
        )
    return plan


def _close(kept: Collection[SupervisedCommand]) -> None:
    for one in kept:
        if one.descriptor is not None:
            os.close(one.descriptor)


def _start_worker(
    records: dict[str, ServerRecord], settings: Mapping[str, str], kept: dict[str, SupervisedCommand]
) -> None:
    """Start the worker, unless it runs with the current servers. A refresh that a dead worker started goes on."""
    if not _runs_with(WORKER, records, settings):
        # One that lives, but has other settings, is stopped with its refreshes, which would ask the former servers.
        dead = WORKER.name in records and not records[WORKER.name].process.alive()
        _start([WORKER], records, settings, kept, spare_children=dead)


def _start(
    programs: list[ServerProgram],
    records: dict[str, ServerRecord],
    settings: Mapping[str, str],
    kept: dict[str, SupervisedCommand],
    *,
    spare_children: bool = False,
) -> None:
    """Start servers in parallel and wait until all answer; when one fails, all are stopped."""
    if not spare_children:
        _stop([records[program.name] for program in programs if program.name in records])
    try:
        for program in programs:
            records[program.name] = _launch(program, records.get(program.name), settings, kept)
            write_records(records)  # at once: if this process dies now, `down` still finds the server
        for program in programs:
            _await(program, records[program.name])
    except BaseException:
        failed = [program.name for program in programs if program.name in records]
        _stop([records.pop(name) for name in failed])
        _close([kept.pop(name) for name in failed if name in kept])
        write_records(records)
        raise


def _launch(
    program: ServerProgram, before: ServerRecord | None, settings: Mapping[str, str], kept: dict[str, SupervisedCommand]
) -> ServerRecord:
    """Start one local server or the worker and return its record.

    before: its last record; it keeps the token and, if possible, the port, since other processes know both. kept: what
    a supervisor has handed over, such as the listening socket; the started server is added.
    """
    token = before.token if before else os.urandom(16).hex()
    former = kept.get(program.name)
    if former and former.descriptor is not None:
        # The supervisor's socket, in whose queue clients may be waiting since the server died.
        public = socket.socket(fileno=former.descriptor)
    else:
        public = listener(before.port if before else None, program.preferred_port)
    port = public.getsockname()[1]
    kept[program.name] = started = _kept(program, port, token, settings)
    # Detached, or the socket would be closed when `public` is collected.
    started.descriptor = public.detach()
    if program is WORKER:
        # A killed worker's own processes; the refreshes that it started have its token, too, and are left out.
        end_processes(started.relatives)
    started.start()
    assert started.pid
    identity = ProcessIdentity.of(started.pid)
    return ServerRecord(process=identity, port=port, token=token, settings=_digest(settings), home=home())


def _kept(program: ServerProgram, port: int, token: str, settings: Mapping[str, str]) -> SupervisedCommand:
    folder = home() / program.name
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**_inherited(program), **NO_TELEMETRY, **settings, **program.environment(folder, port)}
    return SupervisedCommand(
        program.name,
        program.command,
        {**environment, TOKEN_VARIABLE: token},
        port,
        program.health_path,
        folder=str(folder),
        needs=PREFECT.name if program is WORKER else "",
        log=str(folder / "server.log"),
        spares_children=program is WORKER,
    )


def _adopted(program: ServerProgram, record: ServerRecord, settings: Mapping[str, str]) -> SupervisedCommand:
    """Return the command to supervise for a server that was started earlier, with its process if it is alive."""
    kept = _kept(program, record.port, record.token, settings)
    if record.process.alive():
        kept.pid, kept.started_ticks = record.process.pid, started_ticks(record.process.pid)
    kept.deaths = record.deaths
    return kept


def _inherited(program: ServerProgram) -> dict[str, str]:
    """Return this process's environment for a server, without clients' settings, which only the worker may need."""
    clients = ("PREFECT_", "MLFLOW_") if program in SERVERS else ()
    return {name: value for name, value in os.environ.items() if not name.startswith(clients)}


def _digest(settings: Mapping[str, str]) -> str:
    """Return a hash of a server's settings, to detect changes without storing the passwords in them."""
    # With the version, so that servers of an earlier version are started again.
    distinguished = {**settings, "version": importlib.metadata.version("llm-lifecycle")}
    return hashlib.sha256(json.dumps(distinguished, sort_keys=True).encode()).hexdigest()


def _await(program: ServerProgram, record: ServerRecord) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while not is_answering(record.address + program.health_path, timeout_s=1.0):
        if not record.process.alive() or time.monotonic() > end:
            log = home() / program.name / "server.log"
            lines = "\n".join(read_end(log, LOG_END_BYTES).splitlines()[-8:])
            raise ServerError(
                f"starting the {program.name} server on port {record.port}: it does not answer; see {log}, which "
                f"ends with:\n{lines}"
            )
        time.sleep(0.1)


def _stop_refreshes(worker: ServerRecord) -> None:
    """End the refreshes that the worker started, by SIGTERM, so that they stop their stages and record their end."""

    # A refresh that was started by hand does not have the worker's token, and goes on.
    started = marked_processes(worker.token)
    processes = [one.process for one in RunningRefreshes().all() if one.process.pid in started]
    send(signal.SIGTERM, [process.pid for process in processes])
    end = time.monotonic() + STOP_TIMEOUT_S
    # Their ledgers show the end a little before Prefect knows it.
    while any(process.alive() for process in processes) and time.monotonic() < end:
        time.sleep(0.1)


def _stop(records: Collection[ServerRecord]) -> None:
    """Stop the recorded server processes and their descendants: SIGTERM, then SIGKILL to those that remain."""
    tokens = [record.token for record in records]

    def remaining() -> list[int]:
        # Looked up each time: a server that ends may still start processes.
        return [pid for token in tokens for pid in marked_processes(token)]

    send(signal.SIGTERM, remaining())
    wait_for_end(remaining, STOP_TIMEOUT_S)
    end_processes(remaining)


def _lock() -> FileLock:
    """Return the lock under which servers are started and stopped; the kernel releases the lock of a dead process."""
    return FileLock(home() / "servers.lock", fallback_to_soft=False)
