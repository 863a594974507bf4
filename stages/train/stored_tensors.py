"""Whether a checkpoint holds what is to be loaded from it, told from its index alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader

from stages.errors import ModelError

NUM_NAMED = 3


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Key → shape of every tensor."""
    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key: tuple(entry.size) for key, entry in found.items() if hasattr(entry, "size")}


def check_stored(folder: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError, naming what differs, unless the checkpoint has these tensors in these shapes."""
    found = stored_shapes(folder)
    different = [
        f"{key} is {list(found[key]) if key in found else 'missing'}, expected {list(shape)}"
        for key, shape in wanted.items()
        if found.get(key) != tuple(shape)
    ]
    if different:
        raise ModelError(
            f"the checkpoint {folder} is of another model than the one in training: {len(different)} tensors differ "
            f"({'; '.join(different[:NUM_NAMED])}); remove {folder.parent} to train from the start"
        )
