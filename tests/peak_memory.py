"""Peak of a process's own memory, without what the kernel maps of files and can drop."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

INTERVAL_S = 0.002


class PeakMemory:
    """Largest anonymous memory of this process so far, in bytes: `whole`, and `added` to what it had at the start."""

    def __init__(self) -> None:
        self._before = self.whole = anonymous_bytes()

    @property
    def added(self) -> int:
        return self.whole - self._before

    def look(self) -> None:
        self.whole = max(self.whole, anonymous_bytes())


@contextmanager
def watched_memory() -> Iterator[PeakMemory]:
    """Look at this process's memory every two milliseconds, in a thread, until the context ends."""
    peak, ended = PeakMemory(), Event()

    def watch() -> None:
        while not ended.wait(INTERVAL_S):
            peak.look()

    watcher = Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", status)[1])
