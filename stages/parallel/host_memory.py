"""Memory of the host: what programs can take, and what the C library keeps of freed memory until it is given back.

glibc takes tensors below 32 MiB from a heap, in which small objects lie between them: what a layer frees has gaps too
small for the same tensors of the next layer. A forward pass of 30 layers left 1 GiB of such gaps beside 2.4 in use.
"""

import ctypes
from functools import cache
from pathlib import Path


class _Usage(ctypes.Structure):
    """Result of glibc's `mallinfo2`, in bytes and numbers of blocks."""

    # arena, ordblks, smblks, hblks, hblkhd, usmblks, fsmblks, uordblks; then free bytes, and those at the heap's end
    _fields_ = (("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t))


def available_host_bytes() -> int:
    """Return the memory of the host in bytes that programs can still take, pages of files in its cache included."""
    kib = next(line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line)
    return int(kib) * 1024


def give_back_freed_memory(least_bytes: int = 0) -> None:
    """Return freed memory to the system if there are `least_bytes` or more of it; only glibc can (2.33 or later)."""
    library = _library()
    if library and library.mallinfo2().fordblks >= least_bytes:
        library.malloc_trim(0)


@cache
def _library() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim") or not hasattr(library, "mallinfo2"):
        return None
    library.mallinfo2.restype = _Usage
    return library
