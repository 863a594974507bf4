"""Export of a trained model to a Hugging Face folder, one weight at a time.

Weights arrive as a stream of full tensors under the Transformers model's names; rank 0 casts them (except those kept in
fp32), gives them the names and shapes of the original files back and writes shards of at most 5 GB. Everything else
(tokenizer, chat template, generation config) is copied from the start model. An export that lost or renamed a weight is
an error, which `check_exportable` finds before training.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
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
from stages.models.carried_weights import carried_names, read_carried
from stages.models.facts import ModelFacts
from stages.models.loaded_weights import dtype_of_weights
from stages.models.model_folder import follow_file_mask
from stages.models.mtp_weights import ATTRIBUTE, MtpNames
from stages.models.weight_files import read_tensors, weight_paths

MAX_SHARD_BYTES = 5 * 10**9
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")
"""File name suffixes of weight files and their indices."""

NUM_NAMED = 3

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class ScoreHead:
    """Output head of a reward model, which gives one number instead of logits over the vocabulary.

    written_as: name of the head's weight in the files. config: fields of config.json that describe it.
    """

    name: str
    written_as: str
    config: dict[str, Any]


def export_model(
    causal_lm: Any,
    named_weights: Iterable[tuple[str, Tensor]],
    *,
    source: ModelFacts,
    folder: Path,
    dtype: torch.dtype,
    score: ScoreHead | None = None,
) -> None:
    """Write a trained model as a Hugging Face folder.

    Collective: every process consumes `named_weights`, rank 0 writes. score: the head that replaces the one in
    `source`. Raises ModelError for other weights, by name and shape, than `source` has.
    """
    originals = weights_as_stored(causal_lm, named_weights, source, dtype)
    if score:
        originals = ((score.written_as if name == score.name else name, weight) for name, weight in originals)
    carried = carried_names(causal_lm, weight_shapes(source.folder))
    tied = _tied(causal_lm)
    write_model(originals, source=source, folder=folder, dtype=dtype, tied=tied, carried=carried, score=score)


def weights_as_stored(
    causal_lm: Any, named_weights: Iterable[tuple[str, Tensor]], source: ModelFacts, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights, cast, on the CPU, as the files of `source` have them, but for tied and carried ones. Collective.

    named_weights: all of the model, by its own names, one gathered after the other.
    """
    tied = _tied(causal_lm)
    dtype_of = dtype_of_weights(causal_lm, dtype)
    # Generators: weights are gathered, cast and written one after the other, never all in memory.
    kept = ((name, _cast(weight, dtype_of(name))) for name, weight in named_weights if name not in tied)
    # Other ranks only consume the stream, whose gathering is collective; names matter to the writer alone.
    if not is_main_process():
        return kept
    rounded = {
        name: one.dtype
        for name, one in causal_lm.named_buffers()
        if one.is_floating_point() and one.itemsize < dtype_of(name).itemsize
    }
    return _with_stored_buffers(_originals(causal_lm, kept, source.folder), causal_lm, source.folder, rounded)


def _with_stored_buffers(
    weights: Iterable[tuple[str, Tensor]], causal_lm: Any, source: Path, rounded: Mapping[str, torch.dtype]
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights by their names in files; of buffers that only rounding has changed, the values in `source`.

    rounded: dtypes of the model's buffers that hold fewer digits than is written, such as the biases of MiniMax-M2's
    routers in a training in bf16, where Transformers has them in bf16 as well.
    """
    names = set(own_weight_shapes(causal_lm, source, rounded.keys())) if rounded else set()
    stored = dict(read_carried(source, names)) if names else {}
    for name, weight in weights:
        value = stored.get(name)
        if value is not None and any(torch.equal(value.to(one).to(weight), weight) for one in {*rounded.values()}):
            yield name, value.to(weight)
        else:
            yield name, weight


def with_carried(
    weights: Iterable[tuple[str, Tensor]], source: Path, carried: Set[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights; on rank 0 also those named in `carried` and not among them, as they are in `source`."""
    names = set()
    for name, weight in weights:
        names.add(name)
        yield name, weight
    if is_main_process():
        yield from read_carried(source, carried - names)


def check_exportable(causal_lm: Any, source: Path) -> None:
    """Raise ModelError unless an export would write exactly the weights of the model folder `source`."""
    written, expected = own_weight_shapes(causal_lm, source), weight_shapes(source)
    not_needed = {*_tied(causal_lm), *carried_names(causal_lm, expected)}
    unknown = sorted(expected.keys() - written.keys() - not_needed)
    if unknown:
        raise ModelError(
            f"{source} holds {len(unknown)} weights that {type(causal_lm).__name__} does not have with this "
            f"config.json ({', '.join(unknown[:NUM_NAMED])}), so they would not be trained and be lost; config.json "
            "may say fewer layers than there are, or the files be of another model"
        )
    different = sorted(name for name, shape in written.items() if expected.get(name) != shape)
    if different:
        raise ModelError(
            f"{len(different)} weights of {type(causal_lm).__name__} cannot be written as they were read from {source} "
            f"({', '.join(different[:NUM_NAMED])}); this architecture is not exported rightly, so it is not trained"
        )


def own_weight_shapes(causal_lm: Any, source: Path, of: Set[str] | None = None) -> Shapes:
    """Return the shapes of the weights that an export of the model would write, by their names in files.

    of: names of the model's weights; None: all.
    """
    tied = _tied(causal_lm)
    empty = (
        (name, torch.empty_like(weight, device="meta"))  # names and shapes alone, so that nothing is copied
        for name, weight in causal_lm.state_dict().items()
        if name not in tied and (of is None or name in of)
    )
    return {name: tuple(weight.shape) for name, weight in _originals(causal_lm, empty, source)}


def write_model(
    named_weights: Iterable[tuple[str, Tensor]],
    *,
    source: ModelFacts,
    folder: Path,
    dtype: torch.dtype,
    tied: set[str],
    carried: Set[str] = frozenset(),
    score: ScoreHead | None = None,
) -> None:
    """Write a Hugging Face model folder from weights that already have the names of the original files.

    Weights that are `tied` may be missing; those of `source` named in `carried` and not written are copied. Each is
    written in its dtype; `dtype` is that of most, which the config names. Collective; raises as `export_model`.
    """
    # Gathering each weight is collective: ranks that do not write must take part, or rank 0 would wait.
    if not is_main_process():
        for _ in named_weights:
            pass
        return
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder)
    for name, weight in named_weights:
        writer.add(name, weight.to("cpu").contiguous())  # safetensors refuses strided tensors
    for name, weight in read_carried(source.folder, carried - writer.names):
        writer.add(name, weight)
    writer.finish()
    copy_all_but_weights(source.folder, folder)
    _write_config(source, folder, dtype, score.config if score else {})
    written = weight_shapes(folder)
    if score:
        # The source has a language model's head, which the score head replaces: neither is compared.
        tied = {*tied, score.name}
        written.pop(score.written_as)
    _check_same_weights(weight_shapes(source.folder), written, tied)


def copy_all_but_weights(source: Path, folder: Path) -> None:
    """Copy the files of a model folder except its weights and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(path, folder / path.name)


def weight_shapes(folder: Path) -> Shapes:
    """Return the shape of every tensor in a model folder by name, from the file headers alone."""
    shapes: Shapes = {}
    for path in weight_paths(folder):
        with safe_open(path, framework="pt") as weights:
            shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    return shapes


class ShardWriter:
    """Writer of weights to safetensors files of at most 5 GB, which get their final names when all are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: list[list[str]] = []

    def adopt(self, path: Path) -> None:
        """Take a written file of the folder over as the next weight file."""
        assert not self._pending, "files are adopted before weights are added"
        tensors = read_tensors(path)
        path.replace(self._part(len(self._shards)))
        self._shards.append([tensor.name for tensor in tensors])
        self._total_bytes += sum(tensor.end - tensor.start for tensor in tensors)

    @property
    def names(self) -> set[str]:
        return {*self._pending, *(name for shard in self._shards for name in shard)}

    def add(self, name: str, weight: Tensor) -> None:
        """Add a CPU tensor to the next weight file, which is written first if the tensor would make it too large."""
        if self._pending and self._pending_bytes + weight.nbytes > MAX_SHARD_BYTES:
            self._write_shard()
        self._pending[name] = weight
        self._pending_bytes += weight.nbytes

    def finish(self) -> None:
        """Write the remaining weights, give the files their final names and, if there are several, index them."""
        self._write_shard()
        # The final names give the number of files, which is known only now.
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
        # Last: without the index, several files are no model, so that a crash before it leaves none that loads.
        content = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        write_atomically(self._folder / "model.safetensors.index.json", json.dumps(content, indent=2))

    def _write_shard(self) -> None:
        save_file(self._pending, self._part(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index}.partial"


def _tied(causal_lm: Any) -> set[str]:
    return set(getattr(causal_lm, "all_tied_weights_keys", None) or {})


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight on the CPU in `dtype`; integers, such as counters, keep their dtype."""
    return weight.to("cpu", dtype if weight.is_floating_point() else weight.dtype)


def _originals(
    causal_lm: Any, named_weights: Iterable[tuple[str, Tensor]], source: Path
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights under the original files' names, which may lack the model's prefix (GPT-2), and shapes."""
    stored, prefix = weight_shapes(source).keys(), f"{causal_lm.base_model_prefix}."

    def reverted(group: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, weight in revert_weight_conversion(causal_lm, group).items():
            # The name without prefix only where the files have that one and not the full one.
            is_full = name in stored or name.removeprefix(prefix) not in stored
            yield name if is_full else name.removeprefix(prefix), weight

    mtp: MtpNames | None = getattr(getattr(causal_lm, ATTRIBUTE, None), "names", None)
    for group in _groups(named_weights):
        yield from _of_mtp(mtp, group, reverted) if mtp else reverted(group)


def _of_mtp(
    mtp: MtpNames, group: dict[str, Tensor], reverted: Callable[[dict[str, Tensor]], Iterator[tuple[str, Tensor]]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a group of weights under their names in files, of a model with an MTP layer, whose copies are written too.

    The layer's weights get their form in files as those of the layer that it is like. reverted: gives it to others.
    """
    as_like = {layer_name: group[name] for name in group if (layer_name := mtp.as_like(name))}
    yield from ((mtp.in_files(name), weight) for name, weight in reverted(as_like))
    others = {name: weight for name, weight in group.items() if mtp.as_like(name) is None}
    for name, weight in others.items():
        yield from ((copy, weight.clone()) for copy, original in mtp.copied.items() if original == name)
        if part := mtp.part_in_files(name):
            yield part, weight
    yield from reverted({name: weight for name, weight in others.items() if not mtp.part_in_files(name)})


def _groups(named_weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the weights grouped by layer, since Transformers fuses or splits only weights of the same layer."""
    group: dict[str, Tensor] = {}
    current: str | None = None
    for name, weight in named_weights:
        layer = _layer(name)
        # Weights come layer by layer, so that a group is complete when the next layer begins.
        if group and layer != current:
            yield group
            group = {}
        current = layer
        group[name] = weight
    if group:
        yield group


def _layer(name: str) -> str:
    """Return a weight's name up to its first number (its layer, `model.layers.3`), or whole if it has none."""
    parts = name.split(".")
    if parts[0] == ATTRIBUTE:
        return ATTRIBUTE
    # model.layers.3.mlp.experts.7.w1 -> model.layers.3: a layer's experts stay together
    number = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def _write_config(source: ModelFacts, folder: Path, dtype: torch.dtype, fields: dict[str, Any]) -> None:
    config = dict(source.config)
    config.pop("torch_dtype", None)  # what Transformers 4 called `dtype`
    config["dtype"] = str(dtype).removeprefix("torch.")
    write_atomically(folder / "config.json", json.dumps(config | fields, indent=2) + "\n")


def _check_same_weights(expected: Shapes, written: Shapes, tied: set[str]) -> None:
    lost = sorted(name for name, shape in expected.items() if name not in tied and written.get(name) != shape)
    added = sorted(set(written) - set(expected))
    if lost or added:
        raise ModelError(
            f"exporting the trained model: {len(lost)} weights are lost or have another shape ({', '.join(lost[:5])}), "
            f"{len(added)} were not in the original ({', '.join(added[:5])}); this architecture is not exported rightly"
        )
