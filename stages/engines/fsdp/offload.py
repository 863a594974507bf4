"""Host memory for what layers save for the backward pass (`recompute: offload`), instead of memory of the device.

A layer's tensors leave the device while the next layer computes, and come back while the layer after it runs backward:
the device holds those of two layers at a time. The last layer's stay, as its backward pass comes next. Copies run on a
stream of their own, one after the other, so that a copy back cannot overtake the copy that it reads. The device's
tensors belong to the stream that computes, which waits for a copy before it frees or reads them. (`record_stream` would
not make it wait: a host that is ahead of the device would allocate all layers' tensors before the first copy ends.)

On a CPU the same code copies from host memory to host memory: nothing is saved, and every bit can be compared.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from transformers.modeling_layers import GradientCheckpointingLayer

from stages.core.errors import ModelError
from stages.parallel.accelerator import of_device

LEAST_BYTES = 2**12
"""Smallest tensor that leaves the device: a copy takes some microseconds, whatever its size."""
SLAB_BYTES = 2**30
"""Host memory allocated at a time. torch rounds pinned memory up to powers of two, which would waste a quarter of it if
each tensor had an allocation of its own."""
REMEDY = "say `layout.recompute: none`, `selective` or `full`"


def offload_activations(layers: list[nn.Module], device: torch.device) -> None:
    """Make each layer keep in host memory what it saves for the backward pass; ModelError if a layer cannot.

    It is called where Transformers calls a function that recomputes a layer: around what is compiled.
    """
    offloading = _Offloading(device)
    for layer in layers:
        if not isinstance(layer, GradientCheckpointingLayer):
            raise ModelError(
                f"offloading activations of {type(layer).__name__}: Transformers cannot call this kind of layer by a "
                f"function of ours, as it does to recompute layers; {REMEDY}"
            )
        layer._gradient_checkpointing_func = partial(offloading.run, layer, _tensors_of(layer))
        layer.gradient_checkpointing = True
    offloading.last = layers[-1]


def host_memory(num_bytes: int, *, pinned: bool) -> Tensor:
    """Allocate host memory; a device copies to and from pinned memory while it computes."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)


class _Offloading:
    """Copies of all layers of a model: their stream, their host memory, and the layer whose tensors are leaving."""

    last: nn.Module

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device.type)
        self._device, self._pins = device, of_device(device).pins_host_memory
        self._stream = self._module.Stream()
        self._slab, self._used = host_memory(0, pinned=False), 0
        self._leaving: _SavedTensors | None = None
        self._newest: Callable[[], _SavedTensors | None] = lambda: None

    def run(self, layer: nn.Module, weights: list[dict[str, Any]], forward: partial[Any], *args: Any) -> Any:
        """Call a layer's forward pass so that what it saves for the backward pass leaves the device."""
        # What several layers are given, such as rotary embeddings, is there for the others anyway.
        shared = {_memory(one) for one in tree_leaves((args[1:], forward.keywords)) if isinstance(one, Tensor)}
        saved = _SavedTensors(self, weights, shared)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            output = forward(*args)
        if self._leaving:  # by now the copies of the layer before had a layer's time
            self._leaving.free()
        self._leaving = None
        if saved.blocks:  # none in a pass without gradients
            saved.before, self._newest = self._newest, weakref.ref(saved)
            if layer is not self.last:
                saved.leave()
                self._leaving = saved
        return output

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> Any:
        """Queue copies, given as (destination, source), behind what the device computes; return their event."""
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, event: Any) -> None:
        """Let what the device computes from here on begin after copies have ended."""
        self._module.current_stream().wait_event(event)

    def on_host(self, num_bytes: int) -> Tensor:
        """Return host memory, a part of a slab. The slab is torch's again once all parts are freed and copied."""
        if self._used + num_bytes > len(self._slab):
            self._slab, self._used = host_memory(max(SLAB_BYTES, num_bytes), pinned=self._pins), 0
        begin = self._used
        self._used += num_bytes
        return self._slab[begin : self._used]

    def on_device(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


@dataclass(eq=False)
class _Block:
    """Memory of saved tensors, as bytes: on the device, on the host, or while it is copied on both."""

    device: Tensor | None
    version: int
    """Version of the device's memory when it was saved, which grows if an operation overwrites it."""
    host: Tensor | None = None


class _View(NamedTuple):
    """Saved tensor as a view of a block's memory; what autograd keeps in its place."""

    block: _Block
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _SavedTensors:
    """Tensors that a layer saves in one forward pass. Autograd's nodes keep this object until all have run."""

    def __init__(self, offloading: _Offloading, weights: list[dict[str, Any]], shared: set[int]) -> None:
        self._offloading, self._weights, self._shared = offloading, weights, shared
        self.blocks: dict[int, _Block] = {}
        self._event: Any = None
        self._is_back = self._is_used = False
        self.before: Callable[[], _SavedTensors | None] = lambda: None
        """Returns those of the layer that ran before, which runs backward next; None once autograd has freed them."""

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Return what autograd keeps in place of a saved tensor."""
        if tensor.nbytes < LEAST_BYTES or is_traceable_wrapper_subclass(tensor):
            return tensor
        memory = _memory(tensor)
        if memory in self._shared or self._is_weight(memory):  # FSDP2 frees gathered weights, and gathers them again
            return tensor
        if memory not in self.blocks:
            # Several operations save a tensor, or views of it: its memory is copied once, whatever the strides.
            length = tensor.untyped_storage().nbytes() // tensor.itemsize
            self.blocks[memory] = _Block(tensor.as_strided((length,), (1,), 0).view(torch.uint8), tensor._version)
        return _View(self.blocks[memory], tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, kept: Tensor | _View) -> Tensor:
        """Return a saved tensor to the backward pass. The first makes those of the layer that comes next come back."""
        if isinstance(kept, Tensor):
            return kept
        if not self._is_used:
            self._is_used = True
            self.come_back()
            if self._event:  # the last layer's tensors have never left
                self._offloading.wait(self._event)
            self.blocks = {}  # from here on memory is freed with the last node that needs it
            if before := self.before():
                before.come_back()
        assert kept.block.device is not None
        return kept.block.device.view(kept.dtype).as_strided(kept.size, kept.stride, kept.offset)

    def leave(self) -> None:
        """Queue copies to the host. Until `free` the device's memory stays."""
        pairs = []
        for block in self.blocks.values():
            assert block.device is not None
            if block.device._version != block.version:
                raise ModelError(
                    f"offloading activations: a layer overwrites a tensor that its backward pass needs; {REMEDY}"
                )
            block.host = self._offloading.on_host(len(block.device))
            pairs.append((block.host, block.device))
        self._event = self._offloading.copy(pairs)

    def free(self) -> None:
        """Free the device's memory behind the copies to the host."""
        self._offloading.wait(self._event)
        for block in self.blocks.values() if not self._is_back else ():
            block.device = None

    def come_back(self) -> None:
        """Queue copies to the device, of what is not there."""
        if self._is_back:
            return
        self._is_back = True
        pairs = []
        for block in self.blocks.values():
            if block.device is None and block.host is not None:
                block.device = self._offloading.on_device(len(block.host))
                pairs.append((block.device, block.host))
            block.host = None
        if pairs:
            self._event = self._offloading.copy(pairs)

    def _is_weight(self, memory: int) -> bool:
        tensors = (one for group in self._weights for one in group.values() if one is not None)
        return any(_memory(one) == memory for one in tensors if not is_traceable_wrapper_subclass(one))


def _tensors_of(layer: nn.Module) -> list[dict[str, Any]]:
    """Return the tables of a layer's parameters and buffers, in which FSDP2 exchanges shards for gathered weights."""
    return [table for module in layer.modules() for table in (module._parameters, module._buffers) if table]


def _memory(tensor: Tensor) -> int:
    """Return a number that tensors which share memory have in common."""
    return tensor.untyped_storage()._cdata
