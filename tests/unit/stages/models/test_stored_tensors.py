"""Reading a checkpoint's pickled index creates only descriptions of tensors, and runs no code from the file."""

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from stages.core.errors import ModelError
from stages.kinds.train.checkpoints import complete_checkpoint, complete_checkpoints
from stages.models.stored_tensors import CheckpointReader, stored_shapes


class Planted:
    """Malicious object whose pickle creates a folder when it is loaded without restriction."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "step-1"
    tensors = {"a": torch.arange(6.0).view(2, 3), "half": torch.ones(3, dtype=torch.bfloat16), "count": torch.tensor(7)}
    dcp.save({**tensors, "name": "an object"}, checkpoint_id=folder, no_dist=True)
    return folder


def test_what_was_saved_is_read(checkpoint: Path) -> None:
    assert stored_shapes(checkpoint) == {"a": (2, 3), "half": (3,), "count": ()}
    loaded = {"a": torch.zeros(2, 3), "half": torch.zeros(3, dtype=torch.bfloat16), "count": torch.tensor(0)}
    dcp.load(loaded, storage_reader=CheckpointReader(checkpoint), no_dist=True)
    assert torch.equal(loaded["a"], torch.arange(6.0).view(2, 3))
    assert loaded["count"] == 7


def test_code_in_an_index_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    for planted in (Planted(tmp_path / "ran"), Metadata({}, planner_data=Planted(tmp_path / "ran"))):
        (checkpoint / ".metadata").write_bytes(pickle.dumps(planted))
        with pytest.raises(ModelError, match=r"it names 'posix\.mkdir'; expected descriptions of tensors\. Remove"):
            stored_shapes(checkpoint)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        pickle.dumps({"a": 1}),
        pickle.dumps(torch.float32)[:-3],
        b"ctorch\nload\n.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch.serialization\n_get_layout\n(I1\ntR.",
        b"\x80\x04\x8c\x0btorch.utils\x8c\x0a_import_xx\x93.",
    ],
)
def test_an_index_that_is_none_is_an_error_with_a_name(checkpoint: Path, content: bytes) -> None:
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(ModelError, match=r"step-1: its index is not one that was written here"):
        stored_shapes(checkpoint)


def test_a_checkpoint_behind_a_link_is_none(checkpoint: Path, tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    complete_checkpoint(checkpoint, outside / "step-2")
    (inside / "step-2").symlink_to(outside / "step-2")
    assert complete_checkpoints(outside) == [(2, outside / "step-2")]
    assert complete_checkpoints(inside) == []
