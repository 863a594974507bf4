"""Whether a checkpoint holds what is to be loaded from it, by its index alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from stages.core.errors import ModelError

NUM_NAMED = 3


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Key → shape of every tensor."""
    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key: tuple(entry.size) for key, entry in found.items() if hasattr(entry, "size")}


def check_stored(folder: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError, naming what differs, unless the checkpoint has these tensors in these shapes.

    Collective: processes may want different tensors, and all raise what any of them misses.
    """
    found = stored_shapes(folder)
    mine = [
        f"{key} is {list(found[key]) if key in found else 'missing'}, expected {list(shape)}"
        for key, shape in wanted.items()
        if found.get(key) != tuple(shape)
    ]
    everyones: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    different = sorted({problem for problems in everyones for problem in problems})
    if different:
        raise ModelError(
            f"the checkpoint {folder} is of another model than the one in training: {len(different)} tensors differ "
            f"({'; '.join(different[:NUM_NAMED])}); remove {folder.parent} to train from the start"
        )
