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
    assert done.stdout.split() == ["True", "50000"]
