"""When the champion's engine is started again: at once, but for one that dies again and again; never given up."""

from __future__ import annotations

import time

MAX_AT_ONCE = 2
LONGEST_PAUSE_S = 60.0
STEADY_S = 300.0
"""An engine that lived so long starts a new count."""


class Restarts:
    """Counts deaths in a row."""

    def __init__(self) -> None:
        self.num_deaths = 0
        self._due_s = 0.0

    def add(self, lived_s: float) -> float:
        """Count a death after `lived_s` of answering, or a start that failed; returns the seconds until the next
        start."""
        self.num_deaths = 1 if lived_s > STEADY_S else self.num_deaths + 1
        pause_s = 0.0 if self.is_at_once else min(2.0 ** (self.num_deaths - MAX_AT_ONCE), LONGEST_PAUSE_S)
        self._due_s = time.monotonic() + pause_s
        return pause_s

    @property
    def is_at_once(self) -> bool:
        """Whether nothing else goes before the next start."""
        return self.num_deaths <= MAX_AT_ONCE

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due_s
