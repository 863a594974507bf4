"""Reader of the index of a torch.distributed.checkpoint folder, which runs no code from the index's pickle.

torch unpickles the index, `.metadata`, without restriction. It is the only pickle that is read here; tensors are read
by `torch.load(weights_only=True)`, and objects are not loaded.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from stages.core.errors import ModelError
from stages.core.redaction import quoted

NUM_NAMED = 3
INDEX_FILE = ".metadata"
NAME_CHARACTERS = 100
NAMED_IN_INDEX = {
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        )
    ),
}
"""Classes and functions that may be unpickled from a checkpoint's index, in addition to torch's dtypes."""


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler of a checkpoint's index that creates nothing but descriptions of tensors and files."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in NAMED_IN_INDEX:
            return super().find_class(module, name)
        # A pickle names a dtype like a class: torch.float32.
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {quoted(f'{module}.{name}', NAME_CHARACTERS)}")


class CheckpointReader(FileSystemReader):
    """Reader of a checkpoint folder that unpickles nothing but descriptions of tensors, so that no code runs."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read a checkpoint's index without running code; ModelError if it is damaged, or has unknown classes."""
        index = Path(self.path) / INDEX_FILE
        try:
            with index.open("rb") as file:
                metadata = _IndexUnpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
        except Exception as error:  # a damaged pickle raises whatever the objects in it raise
            raise ModelError(
                f"reading the checkpoint in {index.parent}: its index is not one that was written here: "
                f"{type(error).__name__}: {error}; expected descriptions of tensors. Remove {index.parent} to go on "
                "from an earlier checkpoint"
            ) from error
        # As torch's own `read_metadata` does after it has unpickled.
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a torch.distributed.checkpoint folder, by key."""
    found = CheckpointReader(folder).read_metadata().state_dict_metadata
    return {key: tuple(entry.size) for key, entry in found.items() if hasattr(entry, "size")}


def check_stored(folder: Path, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ModelError, naming what differs, unless a checkpoint has the wanted tensors in their shapes.

    Collective: processes may want different tensors, and all raise what any of them misses.
    """
    found = stored_shapes(folder)
    mine = [
        f"{key} is {list(found[key]) if key in found else 'missing'}, expected {list(shape)}"
        for key, shape in wanted.items()
        if found.get(key) != tuple(shape)
    ]
    everyones: list[list[str]] = [[]] * dist.get_world_size()
    # All ranks come here before any raises: the others would wait for one that raised alone.
    dist.all_gather_object(everyones, mine)
    different = sorted({problem for problems in everyones for problem in problems})
    if different:
        raise ModelError(
            f"the checkpoint {folder} is of another model than the one in training: {len(different)} tensors differ "
            f"({'; '.join(different[:NUM_NAMED])}); remove {folder.parent} to train from the start"
        )
