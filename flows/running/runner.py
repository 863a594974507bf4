"""Runner of a single stage: finds it cached, or starts its process, watches it and stores its artifact."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from flows.launch import hook, stage_process
from flows.launch.stage_process import Process, watch
from flows.ledger.record import final_result
from flows.ledger.trace import traced
from flows.planning.plan import PlannedStage
from flows.running.workspace import ResolvedInputs, commit, discard, note_attempt, prepare
from flows.store.content import LOG_FILE, is_pending
from flows.store.record import Artifact, Record, UpstreamEntry
from flows.store.shared import Claim, agree, agreed, claimed, is_unsent
from flows.store.store import Store
from stages.core.contract import Lease, StageConfig, StageResult
from stages.core.errors import OutdatedVerdictError, RefreshStoppedError, StoreError

Launcher = Callable[[Path, StageConfig], Process]
"""Function that starts a stage's processes from the `config.json` in its work folder, with output to `log.txt`."""


@dataclass(frozen=True)
class LiveServer:
    """Server started by a serve stage, which keeps running after the stage's artifact was moved into the store."""

    lease: Lease
    process: Process

    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """Stop the server's process and all its descendants; return when none of them is left."""
        self.process.stop()


@dataclass(frozen=True)
class Attempt:
    """Attempt at building a stage: planned stage, work folder and inputs. resumed: there are earlier scratch files."""

    planned: PlannedStage
    work: Path
    number: int
    resumed: bool
    upstream: Mapping[str, BuiltStage]


@dataclass(frozen=True)
class BuiltStage:
    """Stage whose artifact exists, built by this refresh or found. server: the running server of its serve stage."""

    name: str
    kind: str
    version: str
    state: Literal["built", "cached"]
    seconds: float
    artifact: Path
    record: Record
    server: LiveServer | None = None

    @property
    def metrics(self) -> dict[str, float]:
        return final_result(self.artifact).metrics


@dataclass(frozen=True)
class AttemptEnd:
    """End of an attempt at a stage: its artifact, or its work folder after a failure, duration, result or error."""

    folder: Path
    seconds: float
    result: StageResult | None
    error: BaseException | None


class Observer(Protocol):
    """Observer of a running stage, such as for its events in the ledger; called in the thread that runs the stage."""

    def waiting(self) -> None:
        """Handle the wait for another process that is building the same artifact. Called every 0.2 s of the wait."""

    def started(self, attempt: Attempt) -> str | None:
        """Handle an attempt, before its process starts; return the key by which the artifact names the attempt."""

    def tick(self) -> None:
        """Handle a periodic call while a stage's process runs, about every 0.3 s, and once after its end."""

    def ended(self, end: AttemptEnd) -> None:
        """Handle an attempt's failure or stored artifact; called once for each call of `started`."""


def run_stage(
    planned: PlannedStage,
    upstream: Mapping[str, BuiltStage],
    store: Store,
    observer: Observer,
    *,
    attempt: int = 1,
    stop: threading.Event | None = None,
    launch: Launcher = stage_process.start,
) -> BuiltStage:
    """Return a stage's artifact: from the store if it was built from the same input content, else newly built.

    upstream: at least every stage in `planned.ancestors`, by name. attempt: number of this refresh's attempts at the
    stage, this one included; a forced stage starts from an empty work folder at its first only. stop: when set (from
    another thread), the stage is stopped and `RefreshStoppedError` raised.

    Raises the stage's own error class, also for an artifact that its stage refuses (`StageContext.refuse`), whether
    newly committed, cached, or upstream; further `StageCrashError`, `StageTimeoutError`, `StoreError` (also for a
    damaged artifact: only a forced stage replaces it), `ResourceError` for a full disk.
    """
    for name in planned.ancestors:
        raise_finding(upstream[name])
    work = store.work_folder(planned.kind, planned.name, planned.resume_key)
    running = _Running(
        Attempt(planned, work, attempt, False, upstream),
        _resolve_inputs(planned, upstream),
        store,
        observer,
        stop or threading.Event(),
        launch,
    )
    built = running.found_or_built()
    raise_finding(built)
    return built


def raise_finding(built: BuiltStage) -> None:
    """Raise an error if the stage that made an artifact judged it unusable, and stop the artifact's server then."""
    if refusal := built.record.refusal(built.artifact):
        if built.server:
            built.server.stop()
        raise refusal


@dataclass
class _Running:
    """Stage that this process finds or builds, with what it needs for that."""

    attempt: Attempt
    inputs: ResolvedInputs
    store: Store
    observer: Observer
    stop: threading.Event
    launch: Launcher

    @property
    def planned(self) -> PlannedStage:
        return self.attempt.planned

    def found_or_built(self) -> BuiltStage:
        kind, version, work = self.planned.kind, self.planned.version, self.attempt.work
        # Nothing continues in the work folder of a promotion whose artifact exists.
        has_leftover = kind in hook.PROGRAMS and work.exists()
        # Without the lock, which another refresh may hold for hours: a complete artifact changes no more.
        built = self._found(agreed)
        if built and not is_pending(built.artifact) and not has_leftover:
            return built
        with self.store.lock(kind, self.planned.resume_key, self._wait):
            # Looked up again under the lock: another process may have built it, or died while committing it.
            self.store.recover(kind, version)
            if self.attempt.number > 1 and is_unsent(self.store, kind, version):
                # The first attempt has built it.
                self.attempt = replace(self.attempt, planned=replace(self.planned, forced=False))
            if self.planned.forced and self.attempt.number == 1:
                # Before anything can fail, so that no later attempt continues what an earlier refresh left.
                discard(self.store, work)
            built = self._found(self._agree)
            if built is None or is_pending(built.artifact):
                with claimed(self.store, kind, version, self._wait) as claim:
                    return self._found_or_built_alone(claim)
            self.store.remove(work)  # left by a forced attempt that was killed
        return built

    def _found_or_built_alone(self, claim: Claim | None) -> BuiltStage:
        """Return the artifact: newly built, or another home's that built it before this one could."""
        built = self._found(self._agree)
        if built and not is_pending(built.artifact):
            self.store.remove(self.attempt.work)
            return built
        if built:
            # Another model has become champion since: the verdict is no longer good, and the stage runs again below.
            with suppress(OutdatedVerdictError):
                return self._complete(built, claim)
        resumed = prepare(self.store, self.planned, self.inputs)
        self.attempt = replace(self.attempt, resumed=resumed)
        return self._build(claim)

    def _build(self, claim: Claim | None) -> BuiltStage:
        planned, work, store, observer = self.planned, self.attempt.work, self.store, self.observer
        key = observer.started(self.attempt)
        started_s = time.monotonic()
        # The log holds the output of earlier attempts, too, whose errors must not be taken for this one's.
        log_begin = (work / LOG_FILE).stat().st_size if (work / LOG_FILE).exists() else 0
        process: Process | None = None
        folder = work
        try:
            with store.explained(f"start {planned.name}"):
                process = self.launch(work, traced(planned.config, key))
                # From here on another process can find and end this attempt's processes.
                note_attempt(work, self.inputs, process.token)
            result = watch(process, planned, work, observer.tick, self.stop, log_begin)
            seconds = time.monotonic() - started_s
            if claim:
                claim.check()
                claim.mark(work)
            # Before the commit: a crash after it then leaves an artifact that still has to be registered.
            hook.mark(work, planned.kind)
            artifact = commit(store, planned, self.inputs, result, seconds=seconds, attempt=key)
            folder = artifact.folder
            if is_pending(artifact.folder):
                result = hook.complete(store, planned, artifact.folder, observer.tick, self.stop)
            if claim:
                claim.send(artifact, self._go_on)
        except BaseException as error:
            if process:
                process.stop()
            observer.ended(AttemptEnd(folder, time.monotonic() - started_s, None, error))
            raise
        observer.ended(AttemptEnd(folder, seconds, result, None))
        server = LiveServer(result.lease, process) if result.lease else None
        return self._stage("built", seconds, artifact, server)

    def _complete(self, built: BuiltStage, claim: Claim | None) -> BuiltStage:
        """Finish an artifact's follow-up, such as registering a champion, that an earlier attempt left undone.

        It counts as an attempt on success. Raises `OutdatedVerdictError` for an artifact that has to be built again.
        """
        started_s = time.monotonic()
        result = hook.complete(self.store, self.planned, built.artifact, self.observer.tick, self.stop)
        seconds = time.monotonic() - started_s
        self.observer.started(self.attempt)
        self.observer.ended(AttemptEnd(built.artifact, seconds, result, None))
        if claim and (artifact := self.store.find(built.kind, built.version)):
            claim.send(artifact, self._go_on)
        return replace(built, state="built", seconds=seconds)

    def _found(self, find: Callable[[Store, str, str, Mapping[str, str]], Artifact | None]) -> BuiltStage | None:
        """Return the artifact if `find` knows one; its time leaves out the wait for other homes and refreshes."""
        if self.planned.forced:
            return None
        started_s = time.monotonic()
        artifact = find(self.store, self.planned.kind, self.planned.version, self.inputs.digests)
        if artifact is None:
            return None
        if artifact.damage:
            remedy = f"run again with `--force {self.planned.name}` to build it again"
            raise StoreError(f"the artifact {artifact.folder} is damaged: {'; '.join(artifact.damage)}; {remedy}")
        self.store.note_use(artifact)
        return self._stage("cached", time.monotonic() - started_s, artifact)

    def _stage(
        self, state: Literal["built", "cached"], seconds: float, artifact: Artifact, server: LiveServer | None = None
    ) -> BuiltStage:
        planned = self.planned
        return BuiltStage(
            planned.name, planned.kind, planned.version, state, seconds, artifact.folder, artifact.record, server
        )

    def _wait(self) -> None:
        """Raise RefreshStoppedError if the refresh is stopped while another process builds the same artifact."""
        self.observer.waiting()
        if self.stop.is_set():
            raise RefreshStoppedError(f"{self.planned.name} was waiting for another refresh, which builds the same")

    def _go_on(self) -> None:
        """Raise RefreshStoppedError if the refresh is stopped during a transfer from or to the shared store."""
        if self.stop.is_set():
            raise RefreshStoppedError(f"{self.planned.name} was stopped between the shared store and this machine")

    def _agree(self, store: Store, kind: str, version: str, digests: Mapping[str, str]) -> Artifact | None:
        return agree(store, kind, version, digests, self._go_on)


def _resolve_inputs(planned: PlannedStage, upstream: Mapping[str, BuiltStage]) -> ResolvedInputs:
    is_local = planned.config.execution.is_local  # servers listen on this machine's loopback only
    servers = {name: upstream[name].server for name in planned.ancestors} if is_local else {}
    return ResolvedInputs(
        inputs={name: upstream[name].artifact for name in planned.ancestors},
        leases={name: server.lease for name, server in servers.items() if server and server.alive()},
        upstream={
            field: UpstreamEntry(stage=built.name, kind=built.kind, version=built.version, digest=built.record.digest)
            for field, stage in planned.config.references().items()
            for built in [upstream[stage]]
        },
    )
