"""Load on a served model: clients that send requests continuously, and count answers and failures."""

import threading
import time
from collections import Counter
from collections.abc import Callable

from tests.serving import wait_for


class CutOffError(Exception):
    """Raised when a streamed answer breaks off after its beginning."""


class Load:
    """Clients, each in a thread, that send requests to a server continuously until the `with` block ends.

    ask: asks the question of a number, one for each request, and returns who answered, or what; raises CutOffError, and
    anything else for a failure. answers: numbers by what `ask` returned. cut: answers that broke off. longest_s: of any
    request. last_s: when the latest answer came (monotonic).
    """

    def __init__(self, ask: Callable[[int], str], num_clients: int, pause_s: float = 0.01):
        self.answers: Counter[str] = Counter()
        self.cut = 0
        self.failures: list[str] = []
        self.longest_s, self.last_s = 0.0, time.monotonic()
        self.num_clients = num_clients
        self._ask, self._pause_s = ask, pause_s
        self._is_enough = threading.Event()
        self._threads = [threading.Thread(target=self._ask_on, args=(number,)) for number in range(num_clients)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_enough.set()
        for thread in self._threads:
            thread.join()

    def more(self, answer: str | None = None, timeout_s: float = 300) -> None:
        """Wait until two more answers a client (equal to `answer`, if given) have come, or a request has failed."""

        def count() -> int:
            return self.answers.total() if answer is None else self.answers[answer]

        enough = count() + 2 * self.num_clients
        wait_for(lambda: count() >= enough or self.failures, timeout_s, f"more answers ({answer or 'any'})")

    def _ask_on(self, number: int) -> None:
        while not self._is_enough.wait(self._pause_s):
            number += self.num_clients
            began_s = time.monotonic()
            try:
                self.answers[self._ask(number)] += 1
                self.last_s = time.monotonic()
            except CutOffError:
                self.cut += 1
            except Exception as error:
                self.failures.append(repr(error))
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)
