"""Weight transfer engine of vLLM that takes a training's weights from sealed memory files of the training process.

vLLM's own engines need a GPU. This one is registered with vLLM's factory as `sealed_memory` when a worker imports this
module, for which a server's command names `Registered` (`--worker-extension-cls`). A memory file is in no file system
and gone with the last process that holds it. Its seals say that neither its size nor its content can change any more.
Runs in vLLM's environment and imports nothing of ours.
"""

import fcntl
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "sealed_memory"
DTYPES = {
    str(one).removeprefix("torch."): one
    for one in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
}
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
NUM_NAMED = 3


@dataclass
class Trainer(WeightTransferInitInfo):
    """Process that holds the weights, on this machine."""

    process: int


@dataclass
class SealedFile(WeightTransferUpdateInfo):
    """One memory file: its descriptor in the training process, its random name, and the weights in it.

    offsets: of each weight's first byte. shapes: of whole weights, as they are in files.
    """

    descriptor: int
    file_name: str
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets: list[int]

    def tensors(self, process: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights, which keep the file's memory as long as one of them is used. Raises ValueError."""
        content = _mapped(int(process), int(self.descriptor), self.file_name)
        for name, dtype_name, shape, offset in zip(
            self.names, self.dtype_names, self.shapes, self.offsets, strict=True
        ):
            if dtype_name not in DTYPES:
                raise ValueError(f"{name} is {dtype_name}; expected {', '.join(DTYPES)}")
            dtype, num_elements = DTYPES[dtype_name], prod(shape)
            if min(shape, default=0) < 0 or offset < 0 or offset + num_elements * dtype.itemsize > len(content):
                raise ValueError(f"{name} {shape} lies outside its memory file of {len(content)} bytes")
            yield name, torch.frombuffer(content, dtype=dtype, count=num_elements, offset=offset).view(shape)


def _mapped(process: int, descriptor: int, file_name: str) -> mmap.mmap:
    """Return the content of another process's sealed memory file; raise ValueError for any other file."""
    path = Path(f"/proc/{process}/fd/{descriptor}")
    # The link names the file: a number that was given to another file meanwhile is refused.
    if str(found := path.readlink()) != f"/memfd:{file_name} (deleted)":
        raise ValueError(f"{path} is {found}, not the memory file {file_name}")
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if fcntl.fcntl(opened, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ValueError(f"the memory file {file_name} may still change: it has not all seals")
        # A private mapping may be written to, which tensors expect, and the file stays as it is.
        return mmap.mmap(opened, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(opened)


@dataclass
class Received:
    """Weights that an update has brought: their names in files, and those of the model's parameters that took them."""

    names: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)


class SealedMemoryEngine(WeightTransferEngine[Trainer, SealedFile]):
    """Weight transfer engine that replaces every weight of the served model, and refuses to replace only some."""

    init_info_cls = Trainer
    update_info_cls = SealedFile

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        # Now: the training may remove the folder later.
        self._expected = shapes_in(Path(self.model_config.model))
        self._process: int | None = None
        self._received = Received()

    def init_transfer_engine(self, init_info: Trainer) -> None:
        self._process = init_info.process

    def start_weight_update(self) -> None:
        self._received = Received()
        for module in self.model.modules():
            # vLLM 0.32 packs experts as the CPU's kernel reads them only when it makes this kernel, and else leaves
            # new ones unpacked (`UnquantizedFusedMoEMethod._setup_kernel`); without one it makes it again.
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # Not the base class's, which waits for an accelerator.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SealedFile) -> None:
        if self._process is None:
            raise ValueError("new weights before init_weight_transfer_engine said whose")
        taken = list(self._checked(update_info.tensors(self._process)))
        with disable_mtp_completeness_check():
            self._received.parameters |= self.model.load_weights(taken) or set()

    def _checked(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            if name not in self._expected:
                raise ValueError(f"{name} is no weight of the served model")
            if (expected := self._expected[name]) != tuple(tensor.shape):
                raise ValueError(f"{name} has the shape {list(tensor.shape)}; expected {list(expected)}")
            if name in self._received.names:
                raise ValueError(f"{name} came twice")
            self._received.names.add(name)
            yield name, tensor

    def finish_weight_update(self) -> None:
        parameters = {name for name, _ in self.model.named_parameters()}
        finalize_layerwise_reload(self.model, self.model_config)
        if lacking := sorted(self._expected.keys() - self._received.names):
            raise ValueError(f"{len(lacking)} weights did not come: {', '.join(lacking[:NUM_NAMED])}")
        # As vLLM checks its first load. Quantized ones have parameters that are in no file.
        if self.model_config.quantization is None and (old := sorted(parameters - self._received.parameters)):
            raise ValueError(f"{len(old)} parameters kept their values: {', '.join(old[:NUM_NAMED])}")

    def shutdown(self) -> None:
        self._process = None


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights in a model folder by name, from the headers of its safetensors files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as stored:
            shapes |= {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
    return shapes


class Registered:
    """Extension of vLLM's worker that adds nothing to it: naming it imports this module, which registers the engine."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SealedMemoryEngine)
