"""K-quants: the type of each matrix of a GGUF file, and the blocks, as llama.cpp's library makes them.

A K-quant has 256 numbers in a block. Its mixes, such as `q4_k_m`, give more bits to the matrices that lose most with
few: the head, and in some layers the values of attention and the output projections of feed-forward layers. The mixes
are those of `llama-quantize`, but for its exceptions of certain models; no importance matrix is used.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from stages.core.errors import ResourceError
from stages.serving.engine import K_BLOCK_SIZE, is_k_quant
from stages.serving.llama_cpp import quantize_program
from stages.serving.llama_cpp.engine import find_llama_cpp

PROGRAM = Path(quantize_program.__file__)
HEADER = struct.Struct("<3q")
IN_A_LAYER = re.compile(r"blk\.(\d+)\.(attn_v|ffn_down)\.weight")
HEADS = ("output.weight", "token_embd.weight")
SMALLER_BLOCKS = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}
"""Type for rows that blocks of 256 do not divide: the next better one with blocks of 32."""
NUM_FIRST_VALUES = 4


def type_of(name: str, row_size: int, mix: str, num_layers: int, *, tied: bool) -> Type:
    """Return the type in which a matrix is stored.

    name: in the file.
    row_size: its number of inputs.
    mix: type that the recipe names.
    tied: whether the embedding is also the head.
    """
    chosen = Type[mix.removesuffix("_s").removesuffix("_m").upper()]
    in_a_layer = IN_A_LAYER.fullmatch(name)
    more = in_a_layer and mix.endswith("_m") and _gets_more(int(in_a_layer[1]), num_layers)
    if more or name in HEADS[: 2 if tied else 1]:
        chosen = Type.Q6_K
    elif in_a_layer and mix == "q4_k_s":
        first = NUM_FIRST_VALUES if in_a_layer[2] == "attn_v" else num_layers // 8
        chosen = Type.Q5_K if int(in_a_layer[1]) < first else chosen
    return chosen if row_size % K_BLOCK_SIZE == 0 else SMALLER_BLOCKS[chosen]


def _gets_more(layer: int, num_layers: int) -> bool:
    """Return whether a mix gives a layer more bits: the first and last eighth, and every third between."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


class KQuantizer:
    """Running program that makes blocks."""

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]):
        self._process, self._log = process, log

    def quantize(self, values: np.ndarray[Any, Any], stored_as: Type) -> np.ndarray[Any, Any]:
        """Quantize float32 [rows, columns] to uint8 [rows, bytes of a row].

        Raises ResourceError if the program ends.
        """
        num_rows, num_columns = values.shape
        block, block_bytes = GGML_QUANT_SIZES[stored_as]
        size = num_rows * num_columns // block * block_bytes
        assert self._process.stdin and self._process.stdout
        blocks = b""
        try:
            self._process.stdin.write(HEADER.pack(stored_as, num_rows, num_columns))
            self._process.stdin.write(np.ascontiguousarray(values, np.float32).data)
            self._process.stdin.flush()
            blocks = self._process.stdout.read(size)
        except BrokenPipeError:
            pass  # its message is in its log
        if len(blocks) != size:
            self._process.wait()
            self._log.seek(0)
            reason = self._log.read().decode(errors="replace").strip() or f"it ended with {self._process.returncode}"
            raise ResourceError(
                f"quantizing a matrix to {stored_as.name} by llama.cpp's library: {reason}; make its environment again "
                "(`make llama-cpp`), or choose a gguf_type without `_k`"
            )
        return np.frombuffer(blocks, np.uint8).reshape(num_rows, -1)


@contextmanager
def k_quantizer(mix: str) -> Iterator[KQuantizer | None]:
    """Provide a running quantizer; None for a `gguf_type` that is no K-quant.

    The program ends with its input, and so with us, however we end. Raises ResourceError if llama.cpp is not installed.
    """
    if not is_k_quant(mix):
        yield None
        return
    command: list[str | Path] = [find_llama_cpp().command, "-P", PROGRAM]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        assert process.stdin and process.stdout
        try:
            yield KQuantizer(process, log)
        finally:
            process.stdout.close()
            with suppress(BrokenPipeError):  # of what a program that has ended did not read
                process.stdin.close()
            process.wait()
