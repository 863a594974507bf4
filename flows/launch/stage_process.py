"""Stage processes: started by the recipe's launcher, then watched until they end, serve, time out or are stopped."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from flows.launch import cluster, local
from flows.launch.failures import MemoryKills, failure_of, out_of_memory_message, read_result
from flows.planning.plan import PlannedStage
from stages.core.contract import StageConfig, StageResult
from stages.core.errors import RefreshStoppedError, ResourceError, StageTimeoutError
from stages.core.redaction import redact_files, secrets_in

POLL_INTERVAL_S = 0.05
TICK_INTERVAL_S = 0.3
NONE_COUNTED = "the kernel counted no process that it killed for lack of memory"
NOT_COUNTED_HERE = "whether memory ran out, only the machine that it ran on knows"


class Process(Protocol):
    """Running stage on any launcher, to poll and to stop. token: marks its processes, so that they can be found."""

    token: str

    def poll(self) -> int | None:
        """Return the stage's exit code, or None while it runs. With an exit code, none of its processes is left."""

    def stop(self) -> None:
        """End a stage process and all its descendants; return when none is left."""


def start(work: Path, config: StageConfig) -> Process:
    """Start the stage whose `config.json` is in a work folder, on the launcher that `execution.launcher` names."""
    if config.execution.is_local:
        return local.start(work, config)
    return cluster.start(work, config)


def watch(
    process: Process,
    planned: PlannedStage,
    work: Path,
    tick: Callable[[], None],
    stop: threading.Event,
    log_begin: int = 0,
) -> StageResult:
    """Wait until a stage's process has exited or serves a model, and return the stage's result.

    A server's process goes on, and is kept by a lease. Raises the stage's error, `StageCrashError`, `StageTimeoutError`
    or `RefreshStoppedError`, with the process ended; a kill for lack of memory is a `ResourceError`. tick: called a few
    times a second, so that observers can read what the stage wrote. log_begin: as for `failure_of`.
    """
    memory_kills = MemoryKills.here()
    num_kills = memory_kills.count()  # kills of earlier stages do not count
    try:
        result = _result_while_running(process, planned, work, tick, stop)
        if result:
            return result
        exit_code = process.poll()
        # Before `failure_of` quotes the log.
        redact_files(work, secrets_in({**os.environ, **planned.config.execution.environment}))
        if exit_code:
            is_local = planned.config.execution.is_local
            is_counted = is_local and memory_kills.count() > num_kills
            about_memory = "" if is_counted else NONE_COUNTED if is_local else NOT_COUNTED_HERE
            error = failure_of(work, planned.name, exit_code, log_begin, about_memory)
            if error.died and is_counted:
                reason = out_of_memory_message(planned.name, planned.config, memory_kills)
                raise ResourceError(f"{reason}\n{error}") from error
            raise error
        return read_result(work, planned.name)
    except BaseException:
        process.stop()
        redact_files(work, secrets_in({**os.environ, **planned.config.execution.environment}))
        raise
    finally:
        tick()


def _result_while_running(
    process: Process, planned: PlannedStage, work: Path, tick: Callable[[], None], stop: threading.Event
) -> StageResult | None:
    timeout_s = planned.config.execution.timeout_s
    started_s = ticked_s = time.monotonic()
    while process.poll() is None:
        now_s = time.monotonic()
        if now_s - ticked_s >= TICK_INTERVAL_S:
            ticked_s = now_s
            tick()
        if planned.config.product == "server":
            result = StageResult.read_or_none(work / "result.json")
            if result and result.lease:
                return result
        if timeout_s is not None and now_s - started_s > timeout_s:
            remedy = f"raise stages.{planned.name}.execution.timeout_s, or see {work / 'log.txt'}"
            raise StageTimeoutError(f"{planned.name} ran for more than {timeout_s:g} s and was stopped; {remedy}")
        if stop.wait(POLL_INTERVAL_S):
            raise RefreshStoppedError(f"{planned.name} was stopped, because the refresh was stopped")
    return None
