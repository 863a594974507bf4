"""Event logs of refreshes in a shared store, by which other homes read how its artifacts were made.

    ledgers/<refresh>/ledger.jsonl    events, with paths relative to the home
    ledgers/<refresh>/<attempt>.txt   output of all processes of an attempt

The home of a refresh copies them there whenever an attempt ends, and when the refresh does. Others read them into
`.cache/ledgers/<refresh>/` of their stores, again at each look, and never write to them.
"""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

from flows.ledger.record import LEDGER_FILE, AttemptRecord
from flows.ledger.refreshes import REFRESH_ID, Ledger
from flows.store.content import LOG_FILE
from flows.store.objects import go_on
from flows.store.remote import NAME, SHARED_LEDGERS
from flows.store.store import Store
from stages.core.errors import TransientError
from stages.core.files import write_atomically

COPY_S = 60.0
"""Seconds that copying a log may take, while the refresh goes on to its next stage no sooner."""


def copy_ledger(store: Store, ledger: Ledger, attempt: AttemptRecord | None = None) -> None:
    """Copy a refresh's event log, and an attempt's output, to the shared store; do nothing without one."""
    if store.remote is None:
        return
    there = f"{SHARED_LEDGERS}/{ledger.folder.name}"
    if attempt and (attempt.folder / LOG_FILE).exists():
        store.remote.objects.send(f"{there}/{attempt.name}.txt", attempt.folder / LOG_FILE, _ends_after(COPY_S))
    of_home = re.escape(json.dumps(f"{store.root.parent}/", ensure_ascii=False)[1:-1])
    # Not within a longer path: with the home `/data`, `/mnt/data/…` lies elsewhere.
    text = re.sub(rf"(?<![\w.~/-]){of_home}", "", ledger.file.read_text(encoding="utf-8"))
    store.remote.objects.write(f"{there}/{LEDGER_FILE}", text.encode())


def shared_ledger(store: Store, refresh: str) -> Ledger | None:
    """Return the event log of a refresh, by its whole id, that another home has shared; None if none has."""
    if store.remote is None or not (NAME.fullmatch(refresh) and REFRESH_ID.fullmatch(refresh)):
        return None
    held = store.remote.objects.read(f"{SHARED_LEDGERS}/{refresh}/{LEDGER_FILE}")
    if held is None:
        return None
    copy = Ledger(_copies(store, refresh))
    write_atomically(copy.file, held.content.decode("utf-8", "replace"))
    return copy


def shared_log(store: Store, refresh: str, attempt: str) -> Path | None:
    """Return a folder with the log (`log.txt`) of an attempt in another home; None if there is none."""
    if store.remote is None or not (NAME.fullmatch(refresh) and NAME.fullmatch(attempt)):
        return None
    name = f"{SHARED_LEDGERS}/{refresh}/{attempt}.txt"
    listed = store.remote.objects.written(name)
    if listed is None:
        return None
    folder = store.make_folder(_copies(store, refresh) / attempt)
    with (folder / LOG_FILE).open("wb") as stream:
        store.remote.objects.receive(name, listed.size_bytes, stream.write, go_on)
    return folder


def _ends_after(seconds: float) -> Callable[[], None]:
    """Return a check that raises TransientError once `seconds` have passed."""
    end_s = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > end_s:
            raise TransientError(f"the log was not copied within {seconds:g} s")

    return check


def _copies(store: Store, refresh: str) -> Path:
    return store.make_folder(store.cache_folder(SHARED_LEDGERS) / refresh)
