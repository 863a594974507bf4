"""Garbage collection of a lifecycle home: unreferenced artifacts, and refreshes beyond its retention policy.

With a refresh go its ledger and reports, its flow run in Prefect, its runs in MLflow and in folders of other trackers,
and the artifacts that it alone used. It is kept while an artifact, a registered version or another refresh that is kept
refers to it; then only its flow run goes, to which nothing refers.
"""

import math
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from filelock import Timeout

from flows.champion.champions import connect, kept_versions
from flows.champion.registrations import registrations
from flows.champion.servers_folder import left_folders, left_notes
from flows.ledger.home import home, store_root
from flows.ledger.record import RefreshRecord
from flows.ledger.refreshes import RunningRefreshes, ledger_of, ledgers
from flows.servers.keyed import client_settings, read_key, set_variables
from flows.servers.programs import MLFLOW, PREFECT, ServerProgram
from flows.servers.records import address_of
from flows.store import collect
from flows.store.collect import Collected, Garbage
from flows.store.policy import Policy, RetentionLimits
from flows.store.store import Store
from flows.tracking.copies import runs_folder
from flows.tracking.cursor import read_shipped
from flows.tracking.pruning import delete_runs
from flows.tracking.shipper import shipper_lock
from stages.core.errors import LifecycleError, ServerError, StoreError

VERSION = re.compile(r'"version":"([0-9a-f]{12})"')
"""Pattern of an artifact's version in the event log of a refresh, for logs too damaged to parse."""


class Housekeeping:
    """Removable items of a lifecycle home, found at construction; `collect` removes them.

    A refresh whose ledger is damaged stays, and so do the artifacts that it names.
    """

    def __init__(self, policy: Policy | None, older_than_days: float) -> None:
        """Find what can be removed. policy: None keeps all refreshes. older_than_days: of leftovers."""
        self._store = Store(store_root())
        self._refreshes: dict[Path, RefreshRecord] = {}
        self._referred_to_beyond: list[RefreshRecord] = []
        self.unasked: str | None = None
        """Reason why no old refreshes are removed, such as an MLflow server that does not answer; else None."""
        self._unreadable: list[str] = []
        protected = set(kept_versions())
        records = []
        for ledger in ledgers() if policy else ():
            try:
                records.append(ledger.read())
            except StoreError as error:
                self._unreadable.append(f"cannot judge a refresh by the retention policy: {error}")
                with suppress(OSError):
                    protected |= {*VERSION.findall(ledger.file.read_text(encoding="utf-8", errors="replace"))}
        beyond = policy.keep.beyond(records, time.time_ns() // 1_000_000) if policy else []
        kept = [record for record in records if record not in beyond]
        protected |= {entry.version for record in kept for entry in record.stages.values()}
        referred_to = self._referred_to(policy.keep) if policy else frozenset()
        protected |= {key.rpartition("/")[2] for key in referred_to}
        self.garbage = collect.find_garbage(
            self._store,
            protected,
            older_than_days,
            rooms=home().glob("cache/*/"),
            refreshing_since_s=min(
                (one.started_ms / 1000 for one in RunningRefreshes().all() if not one.interrupted), default=math.inf
            ),
        )
        self.garbage += _left_by_servers(older_than_days)
        if beyond and not self.unasked:
            self._give_up(beyond, {*referred_to, *(entry.attempt for one in kept for entry in one.stages.values())})

    def collect(self) -> Collected:
        """Remove the files and refreshes that were found to be unneeded; go on when one of them cannot be removed."""
        failures = [*self._unreadable, *([self.unasked] if self.unasked else [])]
        with ExitStack() as stack:
            unused: dict[Path, RefreshRecord] = {}
            for folder, record in self._refreshes.items():
                ledger = ledger_of(record.refresh)
                with suppress(Timeout):  # a ledger that is being shipped or retried is removed another time
                    stack.enter_context(shipper_lock(ledger).acquire(blocking=False))
                    unused |= {folder: record} if ledger.read().state != "running" else {}
            try:
                # The servers before the ledgers, without which their ids would be lost.
                _delete_flow_runs([*unused.values(), *self._referred_to_beyond])
                _delete_from_mlflow([*unused.values()])
            except ServerError as error:
                number = len(unused) + len(self._referred_to_beyond)
                failures.append(f"cannot remove {number} refreshes beyond the retention policy: {error}")
                unused = {}
            held = {folder for folder in self._refreshes if folder not in unused}
            held |= {run for folder in held for run in _other_runs(folder.name)}
            garbage = [one for one in self.garbage if one.path not in held]
            done = collect.collect(self._store, garbage)
        return Collected(done.removed, (*done.failures, *failures))

    def _referred_to(self, keep: RetentionLimits) -> frozenset[str]:
        """Return the keys of artifacts, MLflow runs and promote attempts that registered versions refer to.

        If MLflow cannot be asked, these are the artifacts of all models that were ever registered.
        """
        if not registrations() and not any(_runs(ledger.folder.name) for ledger in ledgers()):
            return frozenset()
        try:
            return connect().referred_to(None if keep.champions == "all" else keep.champions)
        except LifecycleError as error:
            self.unasked = f"cannot remove refreshes beyond the retention policy: {error}"
            return frozenset(artifact for one in registrations() for artifact in one.artifacts)

    def _give_up(self, beyond: list[RefreshRecord], referring: set[str | None]) -> None:
        gone = {one.path for one in self.garbage}
        artifacts = self._store.index().artifacts
        referring |= {artifact.record.attempt for artifact in artifacts if artifact.folder not in gone}
        # REFRESH/STAGE-1 -> REFRESH; ids of MLflow runs have no slash.
        needed = {key.partition("/")[0] for key in referring if key}
        for record in beyond:
            folder = ledger_of(record.refresh).folder
            if record.refresh not in needed and needed.isdisjoint(_runs(record.refresh)):
                self._refreshes[folder] = record
                reason = "refresh beyond the retention policy"
                # Last used at infinity: `collect` must not take it for one that was used since.
                for path in (folder, *_other_runs(record.refresh)):
                    self.garbage.append(Garbage(path, collect.size_bytes(path), math.inf, reason))
            else:
                self._referred_to_beyond.append(record)


def _left_by_servers(older_than_days: float) -> Iterator[Garbage]:
    """Yield old files and folders that killed `serve --follow` processes left in `$LIFECYCLE_HOME/servers`."""
    before_s = time.time() - older_than_days * collect.SECONDS_PER_DAY
    for path in (*left_notes(), *left_folders()):
        used_s = collect.used_s(path)
        if used_s <= before_s:
            yield Garbage(path, collect.size_bytes(path), used_s, "left by a server that was killed")


def _other_runs(refresh: str) -> list[Path]:
    """Return the folders that other trackers than MLflow have of a refresh."""
    return [folder / refresh for folder in runs_folder().glob("*") if (folder / refresh).is_dir()]


def _runs(refresh: str) -> list[str]:
    """Return the ids of the MLflow runs of a refresh and its stages."""
    shipped = read_shipped(ledger_of(refresh))
    return [run for run in (shipped.parent_run_id, *(one.run_id for one in shipped.attempts.values())) if run]


def _delete_flow_runs(records: list[RefreshRecord]) -> None:
    """Delete the flow runs of refreshes from Prefect. Raises ServerError when Prefect is needed and does not answer."""
    if any(record.prefect_flow_run_id for record in records):
        is_ours = reach(PREFECT)
        from flows.running.flow_runs import delete_flow_runs

        of_here = [record for record in records if is_ours or not record.is_copied]
        delete_flow_runs([one.prefect_flow_run_id for one in of_here if one.prefect_flow_run_id])


def _delete_from_mlflow(records: list[RefreshRecord]) -> None:
    """Delete the MLflow runs of refreshes. Raises ServerError when there are some and MLflow does not answer."""
    if any(_runs(record.refresh) for record in records):
        is_ours = reach(MLFLOW)
        of_here = [record for record in records if is_ours or not record.is_copied]
        delete_runs([run for record in of_here for run in _runs(record.refresh)], purge=is_ours)


def reach(program: ServerProgram) -> bool:
    """Set clients' variables for Prefect or MLflow; return whether this home runs it. Raises ServerError if none."""
    assert program.variable
    address, named = address_of(program.name), program.named()
    ours = f"{address}{program.client_path}" if address else None
    if named is None:
        password = read_key()
        if not (ours and password):
            raise ServerError(f"the local {program.name} server is not running; `lifecycle up`")
        set_variables({program.variable: ours, **client_settings(program.name, password)})
    return named in (None, ours)
