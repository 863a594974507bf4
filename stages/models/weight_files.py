"""Safetensors files of a model folder, checked by their headers and a few bytes (no torch, milliseconds).

Refuses weights that Transformers would silently load although they cannot be those that were trained: files that no
index lists, integers, all zero, a head that the config says is the embedding, but is not.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from stages.core.errors import ModelError
from stages.core.files import read_json_object
from stages.models.linear_layers import EMBEDDINGS

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
MATRICES = (".weight", "_proj")
"""Endings of names of tensors that must be floating-point; other tensors may be counters or masks."""
HEADS = ("lm_head.weight", "embed_out.weight")
NUM_BLOCKS, BLOCK_BYTES = 16, 4096
"""Number of samples of a tensor's bytes in a file, and bytes in each, to compare tensors without reading them whole."""
NUM_NAMED = 3


@dataclass(frozen=True)
class StoredTensor:
    """Tensor in a safetensors file, as the file's header describes it."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset of the tensor's first byte in the file."""
    end: int

    def sample(self) -> bytes:
        """Return evenly spread samples of the tensor's bytes; equal tensors have equal samples."""
        room = max(0, self.end - BLOCK_BYTES - self.start)
        blocks = []
        with self.file.open("rb") as stream:
            for number in range(NUM_BLOCKS):
                # The last block ends where the tensor does; in a small tensor blocks overlap.
                begin = self.start + room * number // (NUM_BLOCKS - 1)
                stream.seek(begin)
                blocks.append(stream.read(min(BLOCK_BYTES, self.end - begin)))
        return b"".join(blocks)

    def is_zero(self) -> bool:
        """Return whether every element of the tensor is zero. Reads all only if its first bytes are zero."""
        if self.dtype not in FLOAT_BYTES:
            return False
        import numpy as np  # not when a recipe is read

        content = np.memmap(self.file, np.uint8, "r")[self.start : self.end]
        bits = content.view(f"u{FLOAT_BYTES[self.dtype]}")
        return not (bits[:BLOCK_BYTES] << 1).any() and not (bits << 1).any()  # without the sign: there is a -0


def weight_paths(folder: Path) -> list[Path]:
    """Return the weight files that Transformers would read: those that the index names, or the single one."""
    index = folder / WEIGHTS_INDEX
    names = set(read_json_object(index)["weight_map"].values()) if index.is_file() else {WEIGHTS_FILE}
    return sorted(folder / name for name in names)


def check_index(folder: Path, tensors: Mapping[str, Iterable[StoredTensor]]) -> set[str]:
    """Return the weight files that a model's index names; raise ModelError unless it lists exactly their tensors."""
    index = folder / WEIGHTS_INDEX
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no `weight_map` (tensor → file); fetch or save it again")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or file not in tensors:
            raise ModelError(f"{index} says that {tensor} is in {file}, which is missing; fetch that file")
        if tensor not in {stored.name for stored in tensors[file]}:
            raise ModelError(f"{index} says that {tensor} is in {file}, but it is not: the two are of different models")
    listed = set(weight_map.values())
    if WEIGHTS_FILE in tensors and listed != {WEIGHTS_FILE}:
        raise ModelError(
            f"{folder} has both {WEIGHTS_FILE} and {WEIGHTS_INDEX}, two models of which only one is meant; remove one"
        )
    unlisted = [
        f"{stored.name} in {file}"
        for file, found in tensors.items()
        if fnmatch(file, "model*.safetensors")
        for stored in found
        if weight_map.get(stored.name) != file
    ]
    if unlisted:
        raise ModelError(
            f"{index} does not list {len(unlisted)} tensors that the files hold "
            f"({', '.join(unlisted[:NUM_NAMED])}), so they would not be loaded; fetch or save the model again"
        )
    return listed


def read_tensors(path: Path) -> list[StoredTensor]:
    """Return the tensors in a safetensors file. Raises ModelError for an empty file or an inconsistent header."""
    try:
        # Opening checks the header: offsets without gaps that end where the file does.
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is damaged or incomplete ({path.stat().st_size} bytes): {error}; fetch or save this file again"
        ) from error
    with path.open("rb") as stream:
        # The header's length, the header as JSON, then the tensors; their offsets count from there.
        header_bytes = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(header_bytes))
    header.pop("__metadata__", None)
    if not header:
        raise ModelError(f"{path} holds no tensors; fetch or save this file again")
    first = 8 + header_bytes
    return [
        StoredTensor(path, name, about["dtype"], tuple(about["shape"]), *(first + at for at in about["data_offsets"]))
        for name, about in header.items()
    ]


def check_values(tensors: list[StoredTensor], fields: Mapping[str, Any]) -> Iterator[str]:
    """Check the weights of a model that is not quantized, and yield warnings. fields: `ModelFacts.fields`.

    Raises ModelError for integers, for weights that are all zero, and for a tied head that is not the embedding.
    """
    integers = [
        f"{one.name} as {one.dtype}" for one in tensors if one.name.endswith(MATRICES) and one.dtype not in FLOAT_BYTES
    ]
    if integers:
        raise ModelError(
            f"{tensors[0].file.parent} holds {len(integers)} weights that are no plain floating-point numbers "
            f"({', '.join(integers[:NUM_NAMED])}), and its config.json says nothing of a quantization, so they would "
            "be read for what they are not; take the model that it was made from"
        )
    matrices = [one for one in tensors if len(one.shape) > 1 and one.end > one.start]
    zeros = [one.name for one in matrices if one.is_zero()]
    if matrices and len(zeros) == len(matrices):
        raise ModelError(f"all weights in {tensors[0].file.parent} are zero; fetch or save the model again")
    _check_tied(tensors, fields)
    if zeros:
        yield f"{len(zeros)} of {len(matrices)} matrices hold zeros only ({', '.join(zeros[:NUM_NAMED])})"


def _check_tied(tensors: list[StoredTensor], fields: Mapping[str, Any]) -> None:
    head = next((one for one in tensors if one.name.endswith(HEADS)), None)
    if head is None or fields.get("tie_word_embeddings") is not True:
        return
    for one in tensors:
        is_embedding = EMBEDDINGS.search(one.name.removesuffix(".weight")) and one.shape == head.shape
        if is_embedding and one.sample() != head.sample():
            raise ModelError(
                f"{head.file.parent}: config.json says `tie_word_embeddings: true`, but {head.name} is not {one.name}, "
                "and one of them would be lost; say false there, or remove the head from the files"
            )
