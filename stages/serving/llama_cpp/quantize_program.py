"""Program that quantizes weight matrices to GGUF's K-quants with llama.cpp's library in the wheel `xllamacpp`.

It runs in that wheel's environment and imports nothing of ours. stdin: for each matrix three int64 (ggml's number of
the type, rows, columns), then its float32 numbers, row by row. stdout: for each matrix its blocks.
"""

import ctypes
import os
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from io import BufferedReader

HEADER = struct.Struct("<3q")


def main() -> None:
    """Quantize the matrices on stdin to stdout. Exits with 1 and a message if the library does not support the type."""
    spec = find_spec("xllamacpp.xllamacpp")
    if spec is None or spec.origin is None:
        sys.exit("the package xllamacpp holds no library")
    library = ctypes.CDLL(spec.origin)
    # Without these, ctypes would take the results for 32-bit integers.
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_row_size.restype = ctypes.c_size_t
    with open(0, "rb") as matrices, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        while header := matrices.read(HEADER.size):
            sys.stdout.buffer.write(_quantized(library, threads, matrices, *HEADER.unpack(header)))
            sys.stdout.buffer.flush()


def _quantized(
    library: ctypes.CDLL,
    threads: ThreadPoolExecutor,
    matrices: BufferedReader,
    kind: int,
    num_rows: int,
    num_columns: int,
) -> ctypes.Array[ctypes.c_char]:
    values = (ctypes.c_float * (num_rows * num_columns))()
    if matrices.readinto(values) != ctypes.sizeof(values):
        sys.exit("the input ends within a matrix")
    row_bytes = library.ggml_row_size(ctypes.c_int(kind), ctypes.c_int64(num_columns))
    blocks = ctypes.create_string_buffer(row_bytes * num_rows)

    def quantize(rows: range) -> int:
        # ggml counts the start in numbers, not in rows. The last argument, None, is the importance matrix.
        start, count, columns = (ctypes.c_int64(n) for n in (rows.start * num_columns, len(rows), num_columns))
        written: int = library.ggml_quantize_chunk(ctypes.c_int(kind), values, blocks, start, count, columns, None)
        return written

    # Threads run at a time, since ctypes releases the interpreter's lock during a call.
    share = -(-num_rows // len(os.sched_getaffinity(0)))
    parts = [range(first, min(first + share, num_rows)) for first in range(0, num_rows, share)]
    if (written := sum(threads.map(quantize, parts))) != len(blocks):
        sys.exit(f"ggml wrote {written} bytes of type {kind}, expected {len(blocks)}")
    return blocks


if __name__ == "__main__":
    main()
