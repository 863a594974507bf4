"""Settings of Python's garbage collector that save time in processes which import half a million objects."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS_BETWEEN_COLLECTIONS = 150_000
"""New objects after which the garbage collector runs here: a plan makes fewer, none of them garbage worth its time.

Python's default, 700, costs a tenth of a start; 50,000 still cost a twentieth."""


def collect_rarely() -> None:
    """Run the garbage collector less often in this process, and not at its exit, where it took over a second."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    atexit.register(gc.freeze)


@contextmanager
def imports_uncollected() -> Iterator[None]:
    """Disable garbage collection while packages are imported, and exempt their objects from later collections.

    Of 650,000 objects of PyTorch and Transformers a few hundred are garbage, 3 MB; looking for these takes 0.3 s.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
