"""Agreement of a local store with the shared one: what is received from it, what is sent to it, and what a plan sees.

Without the setting `store.yaml`, the local store is all there is. With it, of each artifact the first one that reached
the shared store stands, until a home replaces the very record that it saw (`--force`, or inputs with other content).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from flows.recipe.version import canonical_json
from flows.store.content import UNSENT_FILE, files_in, is_pending
from flows.store.lease import Lease, lease
from flows.store.objects import go_on
from flows.store.record import Artifact, Index, Record
from flows.store.remote import Remote, Shared, lease_name
from flows.store.store import Store
from stages.core.errors import TransientError
from stages.core.fields import Product


class Claim:
    """Right to build an artifact, alone among all homes; the shared record that it will replace was seen under it."""

    def __init__(self, remote: Remote, held: Lease, seen: Shared | None) -> None:
        self._remote, self._lease, self._seen = remote, held, seen

    def check(self) -> None:
        """Raise TransientError if another home has taken over: then nothing may be committed."""
        self._lease.check()

    def mark(self, work: Path) -> None:
        """Note beside what will be committed which shared record it replaces, until it is sent."""
        (work / UNSENT_FILE).write_text(_mark_of(self._seen))

    def send(self, artifact: Artifact, check: Callable[[], None]) -> None:
        """Send the artifact that was built to the shared store, unless it waits for its hook or a person."""
        if not is_pending(artifact.folder):
            send(self._remote, artifact, self._seen, check)


@contextmanager
def claimed(store: Store, kind: str, version: str, waiting: Callable[[], None]) -> Iterator[Claim | None]:
    """Hold the right to build an artifact, under its lock; wait while another home does. None without a shared store.

    waiting: is called every 0.2 s of the wait, and may raise.
    """
    if store.remote is None:
        yield None
        return
    with lease(store.remote.objects, lease_name(kind, version), store.identity(), waiting) as held:
        yield Claim(store.remote, held, store.remote.find(kind, version))


def agreed(store: Store, kind: str, version: str, digests: Mapping[str, str]) -> Artifact | None:
    """Return the local artifact that was built from inputs with these content digests, if the shared store has it, too.

    Without a shared store, any local one.
    """
    local = _good(store, kind, version, digests)
    if local is None or store.remote is None:
        return local
    seen = store.remote.find(kind, version)
    return local if seen and _are_same(local, seen) else None


def agree(
    store: Store, kind: str, version: str, digests: Mapping[str, str], check: Callable[[], None] = go_on
) -> Artifact | None:
    """Return the artifact that was built from inputs with these content digests, after receiving or sending it.

    check: is called every 0.2 s of a transfer; what it raises ends the transfer, which is resumed by the next call.
    A local one that the shared store lacks, or that was built in place of the very record there, is sent; else the
    shared one is received in its place. Call it under the lock.
    """
    local = _good(store, kind, version, digests)
    if store.remote is None:
        return local
    seen = store.remote.find(kind, version)
    replaces = local and _unsent_mark(local) == _mark_of(seen)
    if seen and not seen.record.stale_field(digests) and not replaces:
        return local if local and _are_same(local, seen) else receive(store, store.remote, seen.record, check)
    if local and not local.pending and not local.damage:
        send(store.remote, local, seen, check)
    return local


def is_unsent(store: Store, kind: str, version: str) -> bool:
    """Return whether an artifact was built here and could not be sent to the shared store yet."""
    local = store.find(kind, version)
    return local is not None and _unsent_mark(local) is not None


def _unsent_mark(local: Artifact) -> str | None:
    file = local.folder / UNSENT_FILE
    return file.read_text() if file.exists() else None


def _mark_of(seen: Shared | None) -> str:
    return hashlib.sha256(seen.held.content).hexdigest() if seen else "none"


def _good(store: Store, kind: str, version: str, digests: Mapping[str, str]) -> Artifact | None:
    local = store.find(kind, version)
    return local if local and not local.record.stale_field(digests) else None


def _are_same(local: Artifact, seen: Shared) -> bool:
    # A verdict that waits for its hook, or for a person, is of this home alone.
    return local.pending or local.record.digest == seen.record.digest


def send(remote: Remote, artifact: Artifact, seen: Shared | None, check: Callable[[], None]) -> None:
    """Send an artifact to the shared store. Raises TransientError if another home was faster: its own is then taken."""
    is_sent = remote.send(artifact, seen, check)
    (artifact.folder / UNSENT_FILE).unlink(missing_ok=True)
    if not is_sent:
        raise TransientError(
            f"another home has stored {artifact.record.kind}/{artifact.record.version} in {remote.address} meanwhile; "
            "run again, which takes that one"
        )


def share(store: Store, kind: str, version: str) -> bool:
    """Send an artifact to the shared store unless it is there; return False if neither store has it whole."""
    assert store.remote
    if store.remote.find(kind, version):
        return True
    local = store.find(kind, version)
    if local is None or local.damage or local.pending:
        return False
    # Another home that is faster has sent the same version.
    store.remote.send(local, None)
    return True


def obtain(store: Store, kind: str, version: str) -> Artifact | None:
    """Return an artifact, received from the shared store if it is not here; None if neither has it."""
    local = store.find(kind, version)
    if local or store.remote is None:
        return local
    shared = store.remote.find(kind, version)
    return receive(store, store.remote, shared.record) if shared else None


def receive(store: Store, remote: Remote, record: Record, check: Callable[[], None] = go_on) -> Artifact:
    """Receive an artifact whole into the local store, in place of one of the same version; resume an earlier try."""
    # Of its content, so that files of another one are never taken for its own.
    key = hashlib.sha256(
        canonical_json({name: one["sha256"] for name, one in record.files.items()}).encode()
    ).hexdigest()
    with store.lock(record.kind, key[:12], check):
        local = store.find(record.kind, record.version)
        if local and local.record == record and not local.damage:
            return local  # another process received it while this one waited
        work = store.make_folder(store.work_folder(record.kind, record.stage, key[:12]))
        with store.explained(f"receive {record.kind}/{record.version} from {remote.address}"):
            remote.receive(record.files, work, check)
            for name, path in files_in(work):
                if name not in record.files:
                    path.unlink()
        return store.commit(work, record)


def with_shared(store: Store, index: Index) -> Index:
    """Return the index with which to decide what runs: of the local artifacts, and behind them the shared ones."""
    return _WithShared(store, store.remote, index) if store.remote else index


class _WithShared(Index):
    def __init__(self, store: Store, remote: Remote, local: Index) -> None:
        super().__init__()
        self._store, self._remote, self._local = store, remote, local
        self._asked: dict[tuple[str, str], Artifact | None] = {}

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        return self._local.artifacts

    @property
    def leftovers(self) -> tuple[Path, ...]:
        return self._local.leftovers

    def of_stage(self, kind: str, stage: str) -> Iterable[Artifact]:
        return self._local.of_stage(kind, stage)

    def of_product(self, product: Product) -> Sequence[Artifact]:
        return self._local.of_product(product)

    def find(self, kind: str, version: str) -> Artifact | None:
        if local := self._local.find(kind, version):
            return local
        if (kind, version) not in self._asked:
            self._asked[kind, version] = self._shared(kind, version)
        return self._asked[kind, version]

    def _shared(self, kind: str, version: str) -> Artifact | None:
        found = self._remote.find(kind, version)
        if found is None:
            return None
        record = found.record
        folder = self._store.folder_of(kind, record.stage, version)
        return Artifact(folder, record, record.finished.timestamp(), elsewhere=self._remote.address)
