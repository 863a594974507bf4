"""vLLM's engine for weights by CUDA IPC, with handles as JSON: by HTTP its own takes them only as a pickle.

So `VLLM_ALLOW_INSECURE_SERIALIZATION`, with which a request could run any code, stays off. Registered with vLLM's
factory as `ipc_handles` when a worker imports this module, for which a server's command names `Registered`
(`--worker-extension-cls`). Runs in vLLM's environment and imports nothing of ours but its neighbour.
"""

from dataclasses import dataclass
from typing import Any

from shared_buffers import arguments_of
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine, IPCWeightTransferUpdateInfo

BACKEND = "ipc_handles"


@dataclass
class Buffer(WeightTransferUpdateInfo):
    """Packed weights in one buffer on each GPU. tensor_sizes: in bytes, in order. handles: of the buffers, by uuid."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    tensor_sizes: list[int]
    handles: dict[str, dict[str, Any]]

    def for_vllm(self) -> IPCWeightTransferUpdateInfo:
        return IPCWeightTransferUpdateInfo(
            names=self.names,
            dtype_names=self.dtype_names,
            shapes=self.shapes,
            tensor_sizes=self.tensor_sizes,
            ipc_handles={uuid: arguments_of(handle) for uuid, handle in self.handles.items()},
        )


class HandlesEngine(IPCWeightTransferEngine):
    """vLLM's engine with updates whose handles are JSON."""

    update_info_cls = Buffer

    def receive_weights(self, update_info: Buffer) -> None:
        super().receive_weights(update_info.for_vllm())


class Registered:
    """Extension of vLLM's worker that adds nothing to it: naming it imports this module, which registers the engine."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, HandlesEngine)
