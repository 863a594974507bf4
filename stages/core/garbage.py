"""Rarer garbage collection for processes that import half a million objects, nearly all of which stay."""

from __future__ import annotations

import atexit
import gc

OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""Threshold of allocations for a collection. Python's 700 suit small programs: looking through imported objects again
and again takes a tenth of a start.
"""


def collect_rarely() -> None:
    """Make garbage collections rarer in this process, and skip the last one, which took over a second."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    atexit.register(gc.freeze)
