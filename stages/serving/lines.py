"""Timestamped lines for people who wait for a server at a terminal, or read its output later."""

from __future__ import annotations

import time
from collections.abc import Callable

INTERVAL_S = 10.0


def say(message: str) -> None:
    """Print a line at once."""
    print(f"{time.strftime('%H:%M:%S')} {message}", flush=True)


def starting_lines(title: str) -> Callable[[float], None]:
    """Return a callback for `Server.wait_until_ready` that prints the elapsed seconds every 10 s."""
    reported_s = 0.0

    def report(elapsed_s: float) -> None:
        nonlocal reported_s
        if elapsed_s >= reported_s + INTERVAL_S:
            reported_s = elapsed_s
            say(f"{title} is starting, {elapsed_s:.0f} s so far")

    return report
