"""Weights by CUDA IPC, for a vLLM on the GPUs that train: its workers map a buffer of this process on their own GPU.

At most a memory file's bytes (`BUCKET_BYTES`) lie on a GPU beside the server's weights. The engine in the workers is
vLLM's own `ipc`, which takes handles only as a pickle by HTTP. Ours (`../in_worker/ipc_handles.py`) gives it those that
came as JSON, so that `VLLM_ALLOW_INSECURE_SERIALIZATION` stays off.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.parallel.device_types import ALLOCATOR_VARIABLES, device_type
from stages.serving.engine import LaunchSpec
from stages.serving.vllm.transfers.transfer import IN_WORKER, WeightRoutes, check_same, described, served_shapes

if TYPE_CHECKING:
    from torch import Tensor

    from stages.serving.held_weights import Bucket, HeldWeights


class ByIpc:
    """Way of weights by buffers on the GPUs that the training and its server share."""

    made_for = frozenset({("cuda", "colocated")})
    arguments: Sequence[str] = (
        *("--weight-transfer-config", json.dumps({"backend": "ipc_handles"})),
        *("--worker-extension-cls", "ipc_handles.Registered"),
    )
    environment: Mapping[str, str] = {"PYTHONPATH": str(IN_WORKER)}

    @contextmanager
    def connected(self, server: WeightRoutes, spec: LaunchSpec) -> Iterator[IpcConnection]:
        server.begin({"packed": True})
        yield IpcConnection(server, served_shapes(spec), spec.serving.tensor_parallel_size * spec.data_parallel_size)


@dataclass(frozen=True)
class IpcConnection:
    """Connection to a vLLM on the first `num_devices` GPUs of this process. served: as of `ByMemory`."""

    server: WeightRoutes
    served: Mapping[str, tuple[int, ...]]
    num_devices: int

    def give(self, weights: HeldWeights) -> None:
        import torch

        check_same(weights, self.served)
        self.server.start()
        for bucket in weights.buckets:
            buffers = [staged(bucket, device) for device in range(self.num_devices)]
            handles = dict(handle_of(buffer) for buffer in buffers)
            self.server.update(message(bucket, handles))
            del buffers  # the workers have copied it
        self.server.finish()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def message(bucket: Bucket, handles: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return an update of vLLM's engine for the weights of a bucket. handles: of its copy on each GPU, by uuid."""
    return {**described(bucket.weights), "tensor_sizes": [one.num_bytes for one in bucket.weights], "handles": handles}


def staged(bucket: Bucket, device: int) -> Tensor:
    """Return a bucket's content on a GPU, uint8, in memory that other processes can map."""
    import torch

    with torch.cuda.device(device), fixed_segments():
        buffer = bucket.content().to("cuda")
        torch.cuda.current_stream().synchronize()
    return buffer


@contextmanager
def fixed_segments() -> Iterator[None]:
    """Take memory of the current GPU meanwhile from new segments of a fixed size.

    Those that expand are mapped elsewhere by `pidfd_getfd`, which kernels refuse to processes that may not debug.
    """
    import torch

    settings = next((os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ), None)
    expands = "expandable_segments:True" in (settings or device_type("cuda").allocator or "")
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            yield
    finally:
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expands}")


def handle_of(buffer: Tensor) -> tuple[str, dict[str, Any]]:
    """Return a GPU's uuid, and what another process needs to map a buffer on it (`shared_buffers.arguments_of`)."""
    import torch

    _, handle, num_bytes, offset, counter, counter_offset, event, event_sync = buffer.untyped_storage()._share_cuda_()
    return str(torch.cuda.get_device_properties(buffer.device).uuid), {
        "handle": base64.b64encode(handle).decode(),
        "storage_bytes": num_bytes,
        "storage_offset": offset,
        "counter": base64.b64encode(counter).decode(),
        "counter_offset": counter_offset,
        "event": base64.b64encode(event).decode(),
        "event_sync": event_sync,
        "num_bytes": buffer.numel(),
    }
