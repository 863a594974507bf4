"""Weights of a model folder that Transformers does not load, and that are copied bit for bit when the model is written.

Most are layers of multi-token prediction (MTP), by which servers guess tokens ahead. Transformers skips them when it
loads a model, so a model written from what was loaded would lack them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from stages.models.weight_files import StoredTensor, read_tensors, weight_paths

if TYPE_CHECKING:
    from torch import Tensor

OLD_BUFFERS = r"rotary_emb\.inv_freq$"
"""Pattern of names of weights that only old model files hold; Transformers now computes them from the config."""
MTP_LAYER = re.compile(r"(?P<layer>.*\blayers\.\d+\.)eh_proj\.weight$")
"""Name of the matrix that only layers of multi-token prediction have, among a model's other layers (DeepSeek, GLM)."""

MTP_MODULE = re.compile(r"(^|\.)mtp")
"""Beginning of the name of a module for multi-token prediction, in families that keep it apart (Qwen, MiMo, ERNIE)."""
BLOCK_BYTES = 2**24


def carried_names(causal_lm: Any, names: Iterable[str]) -> set[str]:
    """Return those of a folder's weight names that Transformers skips when it loads the model.

    Its patterns name layers by their numbers in published models; in those of other sizes, `MTP_LAYER` finds them.
    """
    names = set(names)
    skipped = re.compile(
        "|".join([OLD_BUFFERS, *(getattr(causal_lm, "_keys_to_ignore_on_load_unexpected", None) or ())])
    )
    layers = tuple(match["layer"] for name in names if (match := MTP_LAYER.match(name)))
    return {name for name in names if skipped.search(name) or name.startswith(layers)}


def mtp_names(names: Iterable[str]) -> set[str]:
    """Return those of a folder's weight names that are of layers of multi-token prediction."""
    names = set(names)
    layers = tuple(match["layer"] for name in names if (match := MTP_LAYER.match(name)))
    return {name for name in names if MTP_MODULE.search(name) or name.startswith(layers)}


def holds_mtp(folder: Path) -> bool:
    """Return whether a model folder holds layers of multi-token prediction, from the headers of its files."""
    return bool(mtp_names(_stored(folder)))


def read_carried(folder: Path, names: Set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model folder that have these names, one at a time."""
    for path in weight_paths(folder):
        with safe_open(path, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (it is no mapping)
                if name in names:
                    yield name, weights.get_tensor(name)


def changed_or_lost(source: Path, target: Path, names: Set[str], *, in_dtype: bool = False) -> list[str]:
    """Return those of the named weights of `source` that are not, bit for bit, in the model folder `target`.

    in_dtype: compare those of another dtype once they are cast to the one in `target`.
    """
    before, after = _stored(source), _stored(target)
    equal = _are_equal_in_dtype if in_dtype else _are_equal
    return sorted(name for name in names if name not in after or not equal(before[name], after[name]))


def _stored(folder: Path) -> dict[str, StoredTensor]:
    return {tensor.name: tensor for path in weight_paths(folder) if path.is_file() for tensor in read_tensors(path)}


def _are_equal_in_dtype(first: StoredTensor, second: StoredTensor) -> bool:
    if first.dtype == second.dtype:
        return _are_equal(first, second)
    with safe_open(first.file, framework="pt") as one, safe_open(second.file, framework="pt") as other:
        before, after = one.get_tensor(first.name), other.get_tensor(second.name)
    return before.shape == after.shape and bool((before.to(after.dtype) == after).all())


def _are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with first.file.open("rb") as one, second.file.open("rb") as other:
        one.seek(first.start)
        other.seek(second.start)
        sizes = (min(BLOCK_BYTES, first.end - at) for at in range(first.start, first.end, BLOCK_BYTES))
        return all(one.read(size) == other.read(size) for size in sizes)
