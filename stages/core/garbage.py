"""Python's search for garbage, in processes that import half a million objects, nearly all of which stay."""

from __future__ import annotations

import atexit
import gc

OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""Python's own 700 suit small programs: looking through what imports make again and again takes a tenth of a start."""


def collect_rarely() -> None:
    """Have this process look for garbage less often, and no more when it ends: that took over a second."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    atexit.register(gc.freeze)
