"""Weights that are held for a server are those of the training, cannot change, and are gone with their holder."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stages.serving import held_weights
from stages.serving.held_weights import HeldWeights


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(7, generator=generator).bfloat16(),
        "c": torch.tensor(3),
        "d": torch.randn(4, 6, generator=generator).T,  # not contiguous
        "e": torch.randn(1, generator=generator).half(),
        "f": torch.randn(2, 2, generator=generator),  # after two bytes, where a float32 cannot be read
    }


@pytest.fixture
def held(weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldWeights]:
    monkeypatch.setattr(held_weights, "BUCKET_BYTES", 100)
    gathered = HeldWeights.gather(weights.items())
    yield gathered
    gathered.close()


def memory_files() -> list[str]:
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [link for link in links if link.startswith("/memfd:weights-")]


def test_they_are_equal_to_the_bit(held: HeldWeights, weights: dict[str, torch.Tensor]) -> None:
    found = dict(pair for bucket in held.buckets for pair in bucket.tensors())
    assert list(found) == list(weights)
    for name, weight in weights.items():
        assert found[name].dtype == weight.dtype
        assert torch.equal(found[name], weight), name
    assert held.num_bytes == sum(weight.nbytes for weight in weights.values())
    assert len(held.buckets) > 2
    assert all(bucket.num_bytes <= 100 for bucket in held.buckets)


def test_they_stay_as_they_are(held: HeldWeights) -> None:
    """Neither size nor content of a file changes, by its holder or by others; a reader's changes are its own."""
    bucket = held.buckets[0]
    before = bucket.content()
    for change in (lambda: os.write(bucket.descriptor, b"x"), lambda: os.ftruncate(bucket.descriptor, 0)):
        with pytest.raises(PermissionError):
            change()
    writable = os.open(f"/proc/self/fd/{bucket.descriptor}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(writable, b"x", 0)
    os.close(writable)
    before[0] += 1  # a copy of the reader's own
    assert not torch.equal(before, bucket.content())


def test_no_file_outlives_them(held: HeldWeights, weights: dict[str, torch.Tensor]) -> None:
    """A failure while they are gathered, as that of another process, leaves no file; a weight without values is one."""
    assert len(memory_files()) == len(held.buckets)
    with pytest.raises(ValueError, match="g is empty"):
        HeldWeights.gather([*weights.items(), ("g", torch.empty(0, 3))])
    assert len(memory_files()) == len(held.buckets)
    assert not list(Path("/dev/shm").glob("*weights-*"))
