"""Reading and writing of Hugging Face weights for a Megatron model in any layout, never all on one process.

A process reads its shards (`parameter_shards`) from the safetensors files, and sends them, parameter by parameter, to
rank 0, which puts the weights together and writes shards.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from stages.core.errors import ModelError
from stages.engines.export import weight_shapes, with_carried, write_model
from stages.engines.megatron.families import HEAD
from stages.engines.megatron.parameter_shards import ParameterKey, ParameterShard, local_parameter_shards
from stages.engines.weight_slices import WeightFiles
from stages.models.carried_weights import OLD_BUFFERS
from stages.models.facts import ModelFacts
from stages.models.loaded_weights import check_finite
from stages.models.shape import ModelShape

NOT_NEEDED = re.compile(OLD_BUFFERS)
NUM_NAMED = 5


def load_weights(chunks: Sequence[GPTModel], folder: Path, model: ModelShape) -> None:
    """Load this process's parameters, and only their bytes, from the safetensors files in `folder`. Collective.

    Raises ModelError, on every process, for a weight that is missing, of another shape than in the config, or unknown.
    """
    parts = list(local_parameter_shards(chunks, model))
    with WeightFiles(folder) as files:
        _check_files(files, [part for part, _ in parts], model)
        for part, parameter in parts:
            parameter.data.zero_()  # rows of padding
            for piece in part.pieces(model):
                parameter.data[piece.of_parameter()].copy_(files.read(piece.weight, *piece.of_weight()))
        check_finite(folder, ((" and ".join(part.weight_names()), parameter) for part, parameter in parts))


def export_weights(chunks: Sequence[GPTModel], *, source: ModelFacts, folder: Path, dtype: torch.dtype) -> None:
    """Write the trained model as a Hugging Face folder. Collective; rank 0 writes."""
    tied = {HEAD} if source.shape.tied_embeddings else set()
    weights = named_weights(chunks, source.shape, dtype)
    write_model(weights, source=source, folder=folder, dtype=dtype, tied=tied, carried=_carried(source))


def whole_weights(chunks: Sequence[GPTModel], source: ModelFacts, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that `export_weights` writes, on rank 0's CPU only. Collective."""
    return with_carried(named_weights(chunks, source.shape, dtype), source.folder, _carried(source))


def _carried(source: ModelFacts) -> set[str]:
    return {name for name in weight_shapes(source.folder) if NOT_NEEDED.search(name)}


def named_weights(
    chunks: Sequence[GPTModel], model: ModelShape, dtype: torch.dtype, *, learning_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield each whole weight with its Hugging Face name, on rank 0's CPU only. Collective.

    learning_only: only an adapter's trained weights. Parts travel through host memoryto need no device's.
    """
    chosen = [
        (part, parameter)
        for part, parameter in local_parameter_shards(chunks, model)
        if parameter.requires_grad or not learning_only
    ]
    held = {(part.key, part.index): parameter for part, parameter in chosen}
    # The same order on every process, since sends and receives must pair up.
    for parts in _parts_of_all([part for part, _ in chosen]):
        weights: dict[str, Tensor] = {}
        for owner, part in parts:
            # One slice at a time, so that no process holds more than a weight beside its model.
            local = held[part.key, part.index].detach().to("cpu", dtype) if owner == dist.get_rank() else None
            whole_part = _on_first_process(local, owner, part, dtype)
            if whole_part is not None:
                _put(whole_part, part, model, weights)
        yield from weights.items()


def _check_files(files: WeightFiles, parts: Iterable[ParameterShard], model: ModelShape) -> None:
    """Raise ModelError unless the files hold exactly the weights that all processes want, in their shapes."""
    mine: dict[str, tuple[int, ...]] = {}
    for part in parts:
        mine |= part.weight_shapes(model)
    everyones: list[dict[str, tuple[int, ...]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    wanted = {name: shape for shapes in everyones for name, shape in shapes.items()}
    found = files.shapes()
    lacking = [f"{name} {list(shape)}" for name, shape in wanted.items() if found.get(name) != shape]
    unknown = [name for name in found if name not in wanted and not _may_be_left(name, model)]
    if lacking or unknown:
        raise ModelError(
            f"loading {files.folder} with engine megatron: {len(lacking)} weights are missing or have another shape "
            f"than config.json says ({', '.join(lacking[:NUM_NAMED])}), and {len(unknown)} are not in its mapping "
            f"({', '.join(unknown[:NUM_NAMED])}); fetch or save the model again, or say `engine: fsdp`"
        )


def _may_be_left(name: str, model: ModelShape) -> bool:
    return (name == HEAD and model.tied_embeddings) or NOT_NEEDED.search(name) is not None


def _parts_of_all(mine: list[ParameterShard]) -> list[list[tuple[int, ParameterShard]]]:
    """Return all processes' slices of each parameter with their ranks, in the order of writing. Collective."""
    everyones: list[list[ParameterShard]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    owners: dict[ParameterKey, dict[int, tuple[int, ParameterShard]]] = {}
    for rank, parts in enumerate(everyones):
        for part in parts:
            owners.setdefault(part.key, {}).setdefault(part.index, (rank, part))  # of replicas, the lowest rank sends
    return [[owners[key][index] for index in sorted(owners[key])] for key in sorted(owners)]


def _on_first_process(local: Tensor | None, owner: int, part: ParameterShard, dtype: torch.dtype) -> Tensor | None:
    """Send a parameter's tensor-parallel slice from its owner to rank 0, which returns it; others return None."""
    if owner == 0:
        return local
    if local is not None:
        dist.send(local.contiguous(), dst=0)
        return None
    if dist.get_rank() != 0:
        return None
    received = torch.empty(part.shape, dtype=dtype)
    dist.recv(received, src=owner)
    return received


def _put(tensor: Tensor, part: ParameterShard, model: ModelShape, weights: dict[str, Tensor]) -> None:
    """Copy a parameter's tensor-parallel slice into the Hugging Face weights, allocated at their first slice."""
    for name, shape in part.weight_shapes(model).items():
        if name not in weights:
            weights[name] = torch.empty(shape, dtype=tensor.dtype)
    for piece in part.pieces(model):
        weights[piece.weight][piece.of_weight()].copy_(tensor[piece.of_parameter()])
