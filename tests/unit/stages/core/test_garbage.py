"""Processes with many imports run Python's garbage collector rarely."""

import subprocess
import sys

PROGRAM = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count() > 1000, gc.get_threshold()[0]))
from stages.core.garbage import collect_rarely
collect_rarely()
"""


def test_a_process_that_ends_looks_at_nothing_that_it_has_imported():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["True", "150000"]


IMPORTS = """
import gc
from stages.core.garbage import collect_rarely, imports_uncollected
collect_rarely()
collections = []
gc.callbacks.append(lambda phase, _: collections.append(phase))
with imports_uncollected():
    kept = [[] for _ in range(200_000)]
print(len(collections), gc.isenabled(), gc.get_freeze_count() > 200_000)
more = [[] for _ in range(200_000)]
print(len(collections) > 0)
"""


def test_no_garbage_is_collected_among_what_is_imported_but_again_afterwards():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["0", "True", "True", "True"]
