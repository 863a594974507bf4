"""A trained model → a Hugging Face folder, one weight at a time.

Weights arrive as a stream of full tensors under the names of the Transformers model; rank 0 casts them (but for those
that the architecture keeps in fp32), gives them the names and shapes of the original files back and writes shards of at
most 5 GB. Everything else (tokenizer, chat
template, generation config) is copied from the model that training started from. The result is compared with it: an
export that lost or renamed a weight is an error, not a surprise when the model is served.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from stages.core.contract import is_main_process
from stages.core.errors import ModelError
from stages.core.files import write_atomically
from stages.models.kept_precision import dtype_of_weights
from stages.models.model_folder import follow_file_mask

MAX_SHARD_BYTES = 5 * 10**9
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")

Shapes = dict[str, tuple[int, ...]]


def export_model(
    causal_lm: Any, named_weights: Iterable[tuple[str, Tensor]], *, source: Path, folder: Path, dtype: torch.dtype
) -> None:
    """Write `folder`. Collective: every process consumes `named_weights`, rank 0 writes.

    Raises ModelError when the weights written are not those, by name and shape, that `source` has.
    """
    tied = set(getattr(causal_lm, "all_tied_weights_keys", None) or {})
    dtype_of = dtype_of_weights(causal_lm, dtype)
    kept = ((name, _cast(weight, dtype_of(name))) for name, weight in named_weights if name not in tied)
    originals = _originals(causal_lm, kept) if is_main_process() else kept
    write_model(originals, source=source, folder=folder, dtype=dtype, tied=tied)


def write_model(
    named_weights: Iterable[tuple[str, Tensor]], *, source: Path, folder: Path, dtype: torch.dtype, tied: set[str]
) -> None:
    """Write `folder` from weights that have the names of the original files; those that are `tied` may be lacking.

    The weights have the dtypes that they are written in; `dtype` is that of most, which the config names.
    Collective and raises as `export_model`.
    """
    if not is_main_process():
        for _ in named_weights:
            pass
        return
    folder.mkdir(parents=True, exist_ok=True)
    writer = _ShardWriter(folder)
    for name, weight in named_weights:
        writer.add(name, weight.to("cpu").contiguous())
    writer.finish()
    _copy_companions(source, folder)
    _write_config(source, folder, dtype)
    _check_same_weights(weight_shapes(source), weight_shapes(folder), tied)


def weight_shapes(folder: Path) -> Shapes:
    """Name → shape of every tensor in a model folder, from the headers alone."""
    shapes: Shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as weights:
            shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    return shapes


class _ShardWriter:
    """Collects weights and writes them in shards; the names of the files are known when all are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, weight: Tensor) -> None:
        """Take a CPU tensor; may write a shard."""
        if self._pending and self._pending_bytes + weight.nbytes > MAX_SHARD_BYTES:
            self._write_shard()
        self._pending[name] = weight
        self._pending_bytes += weight.nbytes

    def finish(self) -> None:
        """Write what is pending, name the shards `model-00001-of-0000N` and index them."""
        self._write_shard()
        for index in range(len(self._shards)):
            follow_file_mask(self._part(index))
        if len(self._shards) == 1:
            self._part(0).replace(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._shards):
            file = f"model-{index + 1:05}-of-{len(self._shards):05}.safetensors"
            self._part(index).replace(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        content = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        write_atomically(self._folder / "model.safetensors.index.json", json.dumps(content, indent=2))

    def _write_shard(self) -> None:
        save_file(self._pending, self._part(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index}.partial"


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """On the CPU; counters and the like are no floating-point numbers, and stay what they are."""
    return weight.to("cpu", dtype if weight.is_floating_point() else weight.dtype)


def _originals(causal_lm: Any, named_weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Under the names and in the shapes that the files had."""
    for group in _groups(named_weights):
        yield from revert_weight_conversion(causal_lm, group).items()


def _groups(named_weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Weights of one layer together: what Transformers fused on loading (experts, say) is always of one layer."""
    group: dict[str, Tensor] = {}
    current: str | None = None
    for name, weight in named_weights:
        layer = _layer(name)
        if group and layer != current:
            yield group
            group = {}
        current = layer
        group[name] = weight
    if group:
        yield group


def _layer(name: str) -> str:
    """The part of a weight's name up to its first number: `model.layers.3`; the whole name without one."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def _copy_companions(source: Path, folder: Path) -> None:
    for path in source.iterdir():
        if path.is_file() and path.name != "config.json" and not path.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(path, folder / path.name)


def _write_config(source: Path, folder: Path, dtype: torch.dtype) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # what Transformers 4 called `dtype`
    config["dtype"] = str(dtype).removeprefix("torch.")
    write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _check_same_weights(expected: Shapes, written: Shapes, tied: set[str]) -> None:
    lost = sorted(name for name, shape in expected.items() if name not in tied and written.get(name) != shape)
    added = sorted(set(written) - set(expected))
    if lost or added:
        raise ModelError(
            f"exporting the trained model: {len(lost)} weights are lost or have another shape ({', '.join(lost[:5])}), "
            f"{len(added)} were not in the original ({', '.join(added[:5])}); this architecture is not exported rightly"
        )
