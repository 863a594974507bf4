"""Leases on a shared store: objects by which homes with disks of their own build each artifact once.

A holder renews its lease by writing it again, under the condition that it is still as the holder left it. One that does
not change for `LEASE_S` of an onlooker's own clock is free: clocks of machines are never compared. A holder that finds
its lease changed has lost it, and commits nothing.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from flows.ledger.home import HomeIdentity
from flows.store.objects import Held, Objects
from stages.core.errors import LifecycleError, TransientError
from stages.core.fields import StrictModel

LEASE_S = 60.0
RENEWAL_S = 10.0
LOOK_S = 3.0
"""Seconds between two looks at a lease that another home holds."""
WAIT_S = 0.2


class LeaseNote(StrictModel):
    """Content of a lease: who holds it, and a number that is new with each writing. holder: None once it is free."""

    holder: HomeIdentity | None
    nonce: str


class Lease:
    """Lease that this process holds, renewed by a thread of its own."""

    def __init__(self, objects: Objects, name: str, holder: HomeIdentity, held: Held) -> None:
        self._objects, self._name, self._holder, self._held = objects, name, holder, held
        self._is_lost = False
        self._written: set[bytes] = set()  # with no answer so far
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew_on, name=f"lease {name}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Renew the lease now, if the storage answers. Raises TransientError if it is lost: then commit nothing.

        While the storage is away no home can take the lease, and what is sent later is sent by condition.
        """
        with suppress(TransientError):
            self._write(self._holder)
        if self._is_lost:
            raise TransientError(
                f"another home took over {self._name} in {self._objects.address}, since this one could not renew its "
                f"lease for {LEASE_S:g} s; nothing was committed here. Run again: what the other home built is taken"
            )

    def end(self) -> None:
        """Free the lease at once, if it can be reached; else it runs out."""
        self._ended.set()
        self._thread.join()
        with suppress(LifecycleError):
            self._write(None)

    def _renew_on(self) -> None:
        while not self._ended.wait(RENEWAL_S):
            # The storage may be away for hours; the lease is lost only when another home takes it.
            with suppress(LifecycleError):
                self._write(self._holder)

    def _write(self, holder: HomeIdentity | None) -> None:
        with self._lock:
            if not self._is_lost:
                content = _note(holder)
                self._written.add(content)
                held = self._objects.replace(self._name, content, self._held)
                # An earlier writing may have arrived although its answer did not.
                if held is None and (now := self._objects.read(self._name)) and now.content in self._written:
                    held = self._objects.replace(self._name, content, now)
                self._held, self._is_lost = held or self._held, held is None
                if held:
                    self._written = {content}


@contextmanager
def lease(objects: Objects, name: str, holder: HomeIdentity, waiting: Callable[[], None]) -> Iterator[Lease]:
    """Hold a lease; while another home holds it call `waiting`, which may raise, every 0.2 s.

    Processes of one home must exclude each other by other means: one takes over what a dead one of its home left.
    """
    taken = Lease(objects, name, holder, _take(objects, name, holder, waiting))
    try:
        yield taken
    finally:
        taken.end()


def _take(objects: Objects, name: str, holder: HomeIdentity, waiting: Callable[[], None]) -> Held:
    known, since_s = None, time.monotonic()
    while True:
        found = objects.read(name)
        if found is None or found.content != known:
            known, since_s = found.content if found else None, time.monotonic()
        if found is None or _is_free(found, holder) or time.monotonic() - since_s > LEASE_S:
            if held := objects.swap(name, _note(holder), found):
                return held
            waiting()
            time.sleep(WAIT_S)
            continue
        look_again_s = time.monotonic() + LOOK_S
        while time.monotonic() < look_again_s:
            waiting()
            time.sleep(WAIT_S)


def _is_free(found: Held, holder: HomeIdentity) -> bool:
    try:
        note = LeaseNote.model_validate_json(found.content)
    except ValueError:  # not written by this program: it never changes, and runs out
        return False
    return note.holder in (None, holder)


def _note(holder: HomeIdentity | None) -> bytes:
    return LeaseNote(holder=holder, nonce=secrets.token_hex(8)).model_dump_json().encode()
