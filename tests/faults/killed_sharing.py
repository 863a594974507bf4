"""Home with a shared store whose process is killed, by SIGKILL, before a chosen call of a chosen function.

python killed_sharing.py STORE CONTENT [FUNCTION NUMBER]

It builds the stand-in's dataset with content of its own, or receives another home's, and prints which. `half` for
FUNCTION kills it when it has written half of a file that it receives.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from flows.store import lease, objects, remote, store
from tests.faults import tiny

PLACES = {one.__name__: one for one in (objects.Objects, remote.Remote, lease.Lease, store.Store, store)}


def kill_before(path: str, number: int) -> None:
    """Kill this process before the call of this number of a function, such as `Objects.send`."""
    place, _, name = path.rpartition(".")
    owner, num_calls = PLACES[place], 0
    real = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    setattr(owner, name, call)


def kill_halfway() -> None:
    real = objects.Objects.receive

    def receive(self: objects.Objects, name: str, size_bytes: int, take: Any, check: Any) -> None:
        real(self, name, size_bytes // 2, take, check)
        os.kill(os.getpid(), signal.SIGKILL)

    objects.Objects.receive = receive


if __name__ == "__main__":
    root, content, *moment = sys.argv[1:]
    if moment == ["half"]:
        kill_halfway()
    elif moment:
        kill_before(moment[0], int(moment[1]))
    print(tiny.build(store.Store(Path(root)), "ok", environment={"TINY_CONTENT": content}).state)
