"""Lines for a person who waits for a server at a terminal, or reads them later in a file: each has its time."""

from __future__ import annotations

import time
from collections.abc import Callable

INTERVAL_S = 10.0


def say(message: str) -> None:
    """Print a line at once."""
    print(f"{time.strftime('%H:%M:%S')} {message}", flush=True)


def starting_lines(title: str) -> Callable[[float], None]:
    """For `Server.wait_until_ready`: every 10 s, a line with the seconds so far."""
    said_s = 0.0

    def report(elapsed_s: float) -> None:
        nonlocal said_s
        if elapsed_s >= said_s + INTERVAL_S:
            said_s = elapsed_s
            say(f"{title} is starting, {elapsed_s:.0f} s so far")

    return report
