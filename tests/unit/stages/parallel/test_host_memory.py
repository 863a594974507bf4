"""Freed memory between tensors is given back to the system, but not where it is less than is asked for."""

import ctypes
import subprocess
import sys

import pytest

GAPS = """
import ctypes
from stages.parallel.host_memory import give_back_freed_memory

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = []
for _ in range(2000):  # 200 MiB, and small objects between them
    blocks.append(library.malloc(100 * 1024))
    ctypes.memset(blocks[-1], 1, 100 * 1024)
    library.malloc(200)
for block in blocks:
    library.free(block)
full = resident_mib()
give_back_freed_memory(2**30)
kept = resident_mib()
give_back_freed_memory(2**27)
print(full - kept, kept - resident_mib())
"""


def test_freed_memory_is_given_back_if_it_is_enough() -> None:
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("the C library is not glibc 2.33 or later")
    done = subprocess.run([sys.executable, "-c", GAPS], capture_output=True, text=True, check=True)
    kept, given_back = map(float, done.stdout.split())
    assert kept == pytest.approx(0, abs=5)
    assert 180 < given_back < 220
