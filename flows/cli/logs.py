"""Output of all processes of a stage, for `lifecycle logs`, from its work folder or artifact. Needs no server."""

import codecs
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from flows.cli.show import find_artifact, find_refresh
from flows.ledger.home import ledger_root, store_root
from flows.ledger.refreshes import Ledger, ledgers
from flows.store.content import LOG_FILE
from flows.store.ledgers import shared_ledger, shared_log
from flows.store.store import Store
from stages.core.errors import StoreError

POLL_INTERVAL_S = 0.3
CHUNK_BYTES = 65_536


@dataclass(frozen=True)
class StageLog:
    """Log file of one run of a stage, which may still be growing."""

    folder: Path
    ledger: Ledger | None = None
    attempt: str = ""

    def is_growing(self) -> bool:
        """Return whether the stage that writes the log still runs."""
        if not self.ledger:
            return False
        record = self.ledger.read()
        is_over = record.state != "running" or record.interrupted
        return record.attempts[self.attempt].ended is None and not is_over

    def read(self, follow: bool) -> Iterator[str]:
        """Yield the log's text in chunks; with `follow`, until the stage ends. Raises StoreError when it is gone."""
        # A chunk may end in the middle of a character.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        try:
            # Opened before checking whether the attempt runs, because its folder moves into the store at its end.
            with self._opened() as stream:
                growing = True
                while growing:
                    # Asked before the read, so that what came up to the end is still read.
                    growing = follow and self.is_growing()
                    while chunk := stream.read(CHUNK_BYTES):
                        yield decoder.decode(chunk)
                    if growing:
                        time.sleep(POLL_INTERVAL_S)
        except OSError as error:
            raise StoreError(
                f"reading {self.folder / LOG_FILE}: {error.strerror}; `lifecycle gc` or a later try has removed it"
            ) from error

    def _opened(self) -> BinaryIO:
        """Open the stage's log file; wait for it if the stage has only begun, or its folder is being moved."""
        while True:
            growing = self.is_growing()
            try:
                folder = self.ledger.read().attempts[self.attempt].folder if self.ledger else self.folder
                return (folder / LOG_FILE).open("rb")
            except FileNotFoundError:
                if not growing:
                    raise
            time.sleep(POLL_INTERVAL_S)


def find_log(name: str, refresh: str | None) -> StageLog:
    """Return the log of a stage's latest run, or of an artifact, by the stage's or artifact's name.

    refresh: beginning of the id of the refresh whose attempts count. Raises `StoreError` when there is no log.
    """
    store = Store(store_root())
    for ledger in _ledgers(store, refresh):
        if attempts := ledger.read().attempts_at(name):
            if ledger.folder.parent != ledger_root():
                return StageLog(_of_another_home(store, ledger.folder.name, attempts[-1].name))
            return StageLog(attempts[-1].folder, ledger, attempts[-1].name)
    if refresh:
        raise StoreError(f"looking for the log of {name}: refresh {refresh} has not tried to build it")
    artifact = find_artifact(store.index(), name)
    if artifact.record.attempt and store.remote and not (artifact.folder / LOG_FILE).exists():
        refresh_id, _, attempt = artifact.record.attempt.partition("/")
        return StageLog(_of_another_home(store, refresh_id, attempt))
    return StageLog(artifact.folder)


def _of_another_home(store: Store, refresh: str, attempt: str) -> Path:
    """Return a folder with the log that another home has shared. Raises StoreError if it has shared none."""
    folder = shared_log(store, refresh, attempt)
    if folder is None:
        raise StoreError(f"looking for the log of {refresh}/{attempt}: its home has put none into the shared store")
    return folder


def _ledgers(store: Store, refresh: str | None) -> Iterator[Ledger]:
    if refresh is None:
        yield from ledgers()
    elif ledger := find_refresh(refresh) or shared_ledger(store, refresh):
        yield ledger
    else:
        raise StoreError(f"looking for refresh {refresh}: there is none of this id; `lifecycle show` lists them")
