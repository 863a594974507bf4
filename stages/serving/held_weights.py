"""Weights of a training, held in host memory for its sampling server: in files that have no name and cannot change.

Such a memory file (memfd) is in no file system, and gone with the last process that holds it, however that ends.
Sealed, it keeps its size and content, so that a reader needs no lock.
"""

import fcntl
import mmap
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

BUCKET_BYTES = 2**28
"""Size of a memory file, unless a single weight is larger: as much is on a GPU at a time, beside the model."""
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
MOST_BYTES_A_WRITE = 2**30
"""Largest number of bytes of one `write`; Linux takes at most 2 GiB."""


@dataclass(frozen=True)
class HeldWeight:
    """Weight in a memory file: name and shape as in a model's files, and the offset of its first byte."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass
class Bucket:
    """Memory file with some of a model's weights, one directly after the other; `close` it."""

    name: str
    descriptor: int
    weights: list[HeldWeight] = field(default_factory=list)
    num_bytes: int = 0

    @classmethod
    def empty(cls) -> Self:
        name = f"weights-{secrets.token_hex(16)}"
        return cls(name, os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))

    def has_room(self, weight: Tensor) -> bool:
        """Return whether a weight fits, at an offset at which it can be read."""
        return self.num_bytes + weight.nbytes <= BUCKET_BYTES and self.num_bytes % weight.itemsize == 0

    def add(self, name: str, weight: Tensor) -> None:
        """Append a CPU tensor."""
        content = memoryview(weight.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        while content:
            written = os.write(self.descriptor, content[:MOST_BYTES_A_WRITE])
            content = content[written:]
        self.weights.append(HeldWeight(name, weight.dtype, tuple(weight.shape), self.num_bytes))
        self.num_bytes += weight.nbytes

    def seal(self) -> None:
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)

    def content(self) -> Tensor:
        """Return the whole content, uint8 [num_bytes] on the CPU; it stays readable after `close`."""
        mapped = mmap.mmap(self.descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights on the CPU by name, without copying them."""
        content = self.content()
        for one in self.weights:
            of_one = content[one.offset : one.offset + one.num_bytes]
            yield one.name, of_one.view(one.dtype).view(one.shape)

    def close(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True)
class HeldWeights:
    """All weights of a model in memory files; `close` frees them, once no reader maps them any more."""

    buckets: list[Bucket]

    @classmethod
    def gather(cls, weights: Iterable[tuple[str, Tensor]]) -> Self:
        """Copy weights on the CPU, which may come as they are gathered, one at a time. Empty weights are refused."""
        buckets: list[Bucket] = []
        try:
            for name, weight in weights:
                if not weight.numel():
                    raise ValueError(f"{name} is empty")
                if not buckets or not buckets[-1].has_room(weight):
                    buckets.append(Bucket.empty())
                buckets[-1].add(name, weight)
            for bucket in buckets:
                bucket.seal()
        except BaseException:
            for bucket in buckets:
                bucket.close()
            raise
        return cls(buckets)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {one.name: one.shape for bucket in self.buckets for one in bucket.weights}

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    def close(self) -> None:
        for bucket in self.buckets:
            bucket.close()
