"""Recorder of what a training step does on fake GPUs: live and peak memory, collectives, and kernels."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALLOCATED_BYTES = 512
"""Granularity of CUDA's allocator in bytes: it rounds the size of each allocation up to a multiple."""
ANSWERS = {bool: True, int: 1, float: 1e-4}
"""Finite number that is read from a fake tensor, by type: a divisor, and a gradient norm that needs no clipping."""
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
COPIES = ("copy_", "_to_copy", "clone", "cat", "index_select", "index", "stack", "_foreach_copy_")
FUNCTIONAL = {
    "all_reduce": "allreduce",
    "all_gather_into_tensor": "allgather",
    "reduce_scatter_tensor": "reduce_scatter",
}
"""Other names of collectives, as DTensors call them."""
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
NO_KERNELS = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_", "set_")


@dataclass(eq=False)
class Storage:
    """Memory block that one or several fake tensors share, tracked until it is freed or resized."""

    num_bytes: int
    label: str


def _is_mask(indices: Any) -> bool:
    return len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool


class Recorder(TorchDispatchMode):
    """Torch dispatch mode that records memory, collectives and kernels of fake tensors; enter it after their mode.

    Questions about values, which fake tensors lack, are answered: any number is `ANSWERS`, and nothing is zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.at_peak: list[Storage] = []
        self.collectives: Counter[tuple[str, int]] = Counter()
        """Bytes that collectives sent or received (the larger of both), by kind of collective and number of ranks."""
        self.calls: Counter[tuple[str, int]] = Counter()
        self.kernels: Counter[str] = Counter()
        self.forward_kernels: Counter[str] = Counter()
        """Number of kernels launched outside of a backward pass, by operation."""
        self.num_waits = 0
        """Number of times that the host reads values of fake tensors, for which it would wait for a device."""
        reads = {name: self._counted(getattr(FakeTensor, name)) for name in ("tolist", "cpu")}
        self._reads = mock.patch.multiple(FakeTensor, **reads)
        self._live: dict[int, Storage] = {}
        self._gone: dict[int, weakref.ref[Any]] = {}
        self._resize = torch.UntypedStorage.resize_

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let torch compile layers while this mode is active."""
        return True

    def __enter__(self) -> Recorder:
        def resize(storage: torch.UntypedStorage, size: int) -> None:
            self._resize(storage, size)
            if storage._cdata in self._live:
                self._allocate(storage, "gathered")

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]  # how FSDP2 frees what it has gathered
        self._reads.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.stop()
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def begin_step(self) -> None:
        """Reset the recorded peak memory, collectives and kernels before the next training step."""
        self.peak_bytes, self.at_peak, self.num_waits = self.live_bytes, list(self._live.values()), 0
        for counter in (self.collectives, self.calls, self.kernels, self.forward_kernels):
            counter.clear()

    def label(self, tensors: Iterable[Any], label: str) -> int:
        """Count the memory of these tensors under a name such as "optimizer"; return its bytes, without rounding."""
        storages = {storage._cdata: storage for one in tensors for storage in _storages(one)}
        for key in storages:
            if key in self._live:
                self._live[key].label = label
        return sum(storage.nbytes() for storage in storages.values())

    def bytes_at_peak(self) -> dict[str, int]:
        """Return the bytes of each class of tensors, such as "optimizer", at the moment when most memory was in use."""
        classes: Counter[str] = Counter()
        for one in self.at_peak:
            classes[one.label] += one.num_bytes
        return dict(classes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args and isinstance(args[0], FakeTensor) else None
        if first is not None and func in READS:
            self.num_waits += 1
        if first is not None and func is torch.ops.aten._local_scalar_dense.default:
            return ANSWERS[bool if first.dtype == torch.bool else float if first.dtype.is_floating_point else int]
        if first is not None and func is torch.ops.aten.nonzero.default:
            return first.new_empty((first.numel(), first.ndim), dtype=torch.int64)
        namespace, name = func._schema.name.split("::")
        if first is not None and name in INDEXED and _is_mask(args[1]):
            # All are chosen; else shapes would depend on values.
            masked = (args[1][0].numel(), *first.shape[args[1][0].ndim :])
            func, args, kwargs = torch.ops.aten.clone.default, (first if "put" in name else first.reshape(masked),), {}
        if namespace == "c10d":
            self._collective(name, args)
            if "coalesced" in name:  # has no kernel for fake tensors
                return FakeWork().boxed()
        output = func(*args, **(kwargs or {}))
        if namespace == "_c10d_functional" and name != "wait_tensor":  # as DTensors call collectives
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            self._count(FUNCTIONAL.get(name, name), group, [args[0], output])
        if namespace == "fsdp" and name == "chunk_cat":
            self.label(args[0], "gradients")
        made = [storage for leaf in tree_leaves(output) for storage in _storages(leaf)]
        label = "activations" if torch._C._current_graph_task_id() == -1 else "backward"
        new = [storage for storage in made if storage._cdata not in self._live]
        for storage in new:
            self._allocate(storage, label)
        if namespace != "c10d" and (new or func._schema.is_mutable) and name not in NO_KERNELS:
            self.kernels[_kernel_class(name)] += 1
            self.forward_kernels[name] += torch._C._current_graph_task_id() == -1
        return output

    def _counted(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that reads a whole tensor by `read`, which counts as one time, however many elements."""

        def counted(*arguments: Any, **options: Any) -> Any:
            before = self.num_waits
            found = read(*arguments, **options)
            self.num_waits = before + 1
            return found

        return counted

    def _collective(self, name: str, args: Any) -> None:
        leaves = tree_leaves(args)
        groups = [
            dist.ProcessGroup.unbox(leaf)
            for leaf in leaves
            if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())
        ]
        self._count(name.strip("_").removesuffix("_base"), groups[0], args)

    def _count(self, name: str, group: dist.ProcessGroup, tensors: Iterable[Any]) -> None:
        kind = name, group.size()
        sides = [sum(one.nbytes for one in tree_leaves(side) if isinstance(one, Tensor)) for side in tensors]
        self.calls[kind] += 1
        self.collectives[kind] += max(sides)

    def _allocate(self, storage: torch.UntypedStorage, label: str) -> None:
        key = storage._cdata
        if key in self._live:
            self._free(key)
        else:
            self._gone[key] = weakref.ref(storage, lambda _: self._forget(key))
        allocated = -(-storage.nbytes() // ALLOCATED_BYTES) * ALLOCATED_BYTES
        self._live[key] = Storage(allocated, label)
        self.live_bytes += allocated
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.at_peak = self.live_bytes, list(self._live.values())

    def _free(self, key: int) -> None:
        self.live_bytes -= self._live.pop(key).num_bytes

    def _forget(self, key: int) -> None:
        self._free(key)
        del self._gone[key]


def _storages(leaf: Any) -> list[torch.UntypedStorage]:
    local = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
    is_on_device = isinstance(local, FakeTensor) and local.device.type != "meta"
    return [local.untyped_storage()] if is_on_device else []


def _kernel_class(name: str) -> str:
    if name in PRODUCTS:
        return "products"
    if "attn" in name or "attention" in name:
        return "attention"
    if "adam" in name:
        return "optimizer"
    return "copies" if name in COPIES else "other"
