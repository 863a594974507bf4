"""Upkeep of a shared store: contents that are missing, and objects that no home needs any more."""

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from flows.store.collect import SECONDS_PER_DAY, Collected, Garbage, needed
from flows.store.objects import Listed
from flows.store.record import Artifact, Index, Record
from flows.store.remote import FRESH, RECORD_NAME, SHA256, SHARED_JOBS, SHARED_LEDGERS, Remote, blob_name
from stages.core.errors import LifecycleError, StoreError


@dataclass(frozen=True)
class Unneeded:
    """Object of a shared store that may be deleted, with the reason."""

    listed: Listed
    reason: str


def lacking(remote: Remote) -> Iterator[tuple[Record | StoreError, tuple[str, ...]]]:
    """Yield each shared artifact's record, and which of its files the shared store lacks or has in another size.

    In place of a record that cannot be read comes the reason. Contents are compared with their sha256 when they are
    received.
    """
    sizes = {one.name: one.size_bytes for one in remote.objects.below("blobs")}
    for shared, _ in remote.records():
        if isinstance(shared, StoreError):
            yield shared, ()
            continue
        files = shared.record.files.items()
        yield (
            shared.record,
            tuple(
                name
                for name, entry in files
                if entry["size"] and sizes.get(blob_name(entry["sha256"])) != entry["size"]
            ),
        )


def find_unneeded(
    remote: Remote, protected: Collection[str], older_than_days: float
) -> tuple[list[Unneeded], tuple[str, ...]]:
    """Return the records of superseded artifacts, and contents that no other record names, as far as they are old.

    Kept are, of each stage of each recipe, the artifact that was sent last, those with versions in `protected`, all
    that these were built from, the ledgers of the refreshes that built them, and what was written in the last two
    days: a home may be about to name it in a record.
    Beside them comes why objects below `records/` are none; while an artifact's record cannot be read, all artifacts
    and contents are kept, since it may name them.
    """
    before_s = time.time() - max(older_than_days * SECONDS_PER_DAY, 2 * FRESH.total_seconds())
    sent: dict[str, tuple[Artifact, Listed]] = {}
    unread: dict[str, StoreError] = {}
    for shared, listed in remote.records():
        if isinstance(shared, StoreError):
            unread[listed.name] = shared
        else:
            sent[listed.name] = Artifact(Path(listed.name), shared.record, listed.written.timestamp()), listed
    kept = needed(Index(artifact for artifact, _ in sent.values()), protected, ())
    are_known = not any(RECORD_NAME.fullmatch(name) for name in unread)
    superseded = [
        listed
        for artifact, listed in (sent.values() if are_known else ())
        if artifact not in kept and listed.written.timestamp() < before_s
    ]
    gone = {listed.name for listed in superseded}
    named = {
        blob_name(entry["sha256"])
        for name, (artifact, _) in sent.items()
        if name not in gone
        for entry in artifact.record.files.values()
    }
    attempts = (one.record.attempt for name, (one, _) in sent.items() if name not in gone)
    refreshes = {attempt.partition("/")[0] for attempt in attempts if attempt}
    jobs, newest_s = [*remote.objects.below(SHARED_JOBS)], dict[str, float]()
    for one in jobs:
        job = one.name.split("/")[1]
        newest_s[job] = max(newest_s.get(job, 0.0), one.written.timestamp())
        if one.name.endswith(".json") and (held := remote.objects.read(one.name)):
            # Of a job that waits in its queue, or runs, for longer than contents without a record are kept.
            named |= {blob_name(digest) for digest in SHA256.findall(held.content.decode("utf-8", "replace"))}
    blobs = [one for one in remote.objects.below("blobs") if one.name not in named] if are_known else []
    ledgers = (one for one in remote.objects.below(SHARED_LEDGERS) if one.name.split("/")[1] not in refreshes)
    unneeded = [
        # Records first: one whose contents are gone would be worse than contents without a record.
        *(Unneeded(one, f"superseded in {remote.address}") for one in superseded),
        *(
            Unneeded(one, f"named by no record of {remote.address}")
            for one in blobs
            if one.written.timestamp() < before_s
        ),
        *(
            Unneeded(one, "its cluster job has had no sign of life")
            for one in jobs
            if newest_s[one.name.split("/")[1]] < before_s
        ),
        *(
            Unneeded(one, f"no artifact of {remote.address} comes from this refresh")
            for one in (ledgers if are_known else ())
            if one.written.timestamp() < before_s
        ),
    ]
    return unneeded, tuple(str(error) for error in unread.values())


def delete(remote: Remote, unneeded: Collection[Unneeded]) -> Collected:
    """Delete objects of a shared store, unless they were written again since; go on after failures."""
    removed, failures = [], []
    for item in unneeded:
        try:
            now = remote.objects.written(item.listed.name)
            # Some storages list milliseconds, and name seconds alone when they are asked for one object.
            if now and replace(now, written=_seconds(now)) == replace(item.listed, written=_seconds(item.listed)):
                remote.objects.delete(item.listed.name)
                removed.append(as_garbage(item))
        except LifecycleError as error:
            failures.append(str(error))
    return Collected(tuple(removed), tuple(failures))


def _seconds(listed: Listed) -> datetime:
    return listed.written.replace(microsecond=0)


def as_garbage(one: Unneeded) -> Garbage:
    """Return an object that may be deleted as an entry in the list of what was removed."""
    return Garbage(Path(one.listed.name), one.listed.size_bytes, one.listed.written.timestamp(), one.reason)
