"""Weights by NCCL, for a vLLM on NVIDIA GPUs of its own: this process broadcasts them to the server's workers.

vLLM's engine `nccl` in the workers joins a group that this process opens, with rank 0, by an id of NCCL's own: so no
port is opened for the rendezvous. Both environments need an NCCL of the same version.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from stages.core.errors import TransientError
from stages.serving.engine import LaunchSpec
from stages.serving.vllm.transfers.transfer import WeightRoutes, check_same, described, served_shapes

if TYPE_CHECKING:
    from stages.serving.held_weights import HeldWeights


class ByNccl:
    """Way of weights by a broadcast from this process's GPU to those of the server."""

    made_for = frozenset({("cuda", "separate")})
    arguments: Sequence[str] = ("--weight-transfer-config", json.dumps({"backend": "nccl"}))
    environment: Mapping[str, str] = MappingProxyType({})

    @contextmanager
    def connected(self, server: WeightRoutes, spec: LaunchSpec) -> Iterator[NcclConnection]:
        import torch

        served = served_shapes(spec)
        num_processes = 1 + spec.serving.tensor_parallel_size * spec.data_parallel_size
        group_id = torch.cuda.nccl.unique_id()

        def join() -> object:
            group = torch.cuda.nccl.init_rank(num_processes, group_id, 0)
            # vLLM's workers add one number up as soon as they are in the group, and wait for all.
            torch.cuda.nccl.all_reduce([torch.zeros(1, device="cuda")], comms=[group])
            torch.cuda.current_stream().synchronize()
            return group

        group = _together(join, lambda: server.begin(init_info(group_id, num_processes)), server.timeout_s)
        yield NcclConnection(server, served, group)


@dataclass(frozen=True)
class NcclConnection:
    """Connection to a vLLM whose workers are in one NCCL group with this process. served: as of `ByMemory`."""

    server: WeightRoutes
    served: Mapping[str, tuple[int, ...]]
    group: object

    def give(self, weights: HeldWeights) -> None:
        check_same(weights, self.served)
        self.server.start()
        described_all = described([one for bucket in weights.buckets for one in bucket.weights])
        _together(lambda: self._broadcast(weights), lambda: self.server.update(described_all), self.server.timeout_s)
        self.server.finish()

    def _broadcast(self, weights: HeldWeights) -> None:
        import torch

        for bucket in weights.buckets:
            for _, weight in bucket.tensors():
                on_device = weight.to("cuda")
                torch.cuda.nccl.broadcast([on_device], comms=[self.group])
        torch.cuda.current_stream().synchronize()


def init_info(group_id: bytes, num_processes: int) -> dict[str, Any]:
    """Return what vLLM's workers need to join the group; their ranks begin at 1. One broadcast a weight follows."""
    return {
        "nccl_unique_id_b64": base64.b64encode(group_id).decode(),
        "rank_offset": 1,
        "world_size": num_processes,
        "packed": False,
    }


def _together(here: Callable[[], Any], there: Callable[[], None], timeout_s: float) -> Any:
    """Run our part of a collective operation beside the request for the server's part, and return ours.

    Raises what the server answers at once: ours would wait for it without end. TransientError after the timeout.
    """
    threads = ThreadPoolExecutor(2, thread_name_prefix="weights")
    try:
        ours, theirs = threads.submit(_on_device(here)), threads.submit(there)
        theirs.result()
        return ours.result(timeout_s)
    except TimeoutError as error:
        raise TransientError(f"the weights' broadcast to the server that samples took over {timeout_s:g} s") from error
    finally:
        threads.shutdown(wait=False)


def _on_device(run: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that runs in another thread on the GPU that this thread uses."""
    import torch

    device = torch.cuda.current_device()

    def on_device() -> Any:
        with torch.cuda.device(device):
            return run()

    return on_device
