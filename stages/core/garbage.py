"""Rarer garbage collection for processes that import half a million objects, nearly all of which stay."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""Number of new objects after which Python's garbage collector runs; its default is 700.

That suits small programs: looking through imported objects again and again takes a tenth of a start.
"""


def collect_rarely() -> None:
    """Make garbage collections rarer in this process, and skip the last one, which took over a second."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    atexit.register(gc.freeze)


@contextmanager
def imports_uncollected() -> Iterator[None]:
    """Collect no garbage while packages are imported, and leave their objects out of all later collections.

    Of 650,000 objects of PyTorch and Transformers a few hundred are garbage, 3 MB; looking for these takes 0.3 s.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
