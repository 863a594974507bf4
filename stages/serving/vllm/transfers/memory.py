"""Weights by sealed memory files, for a vLLM on a CPU: its workers map the files of this process.

The engine that does so in the workers is `../in_worker/sealed_weights.py`, since vLLM's own need a GPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stages.serving.engine import LaunchSpec
from stages.serving.vllm.transfers.transfer import IN_WORKER, WeightRoutes, check_same, described, served_shapes

if TYPE_CHECKING:
    from stages.serving.held_weights import Bucket, HeldWeights


class ByMemory:
    """Way of weights by memory files of the training process, on the same machine."""

    made_for = frozenset({("cpu", "separate"), ("cpu", "colocated")})
    arguments: Sequence[str] = (
        *("--weight-transfer-config", json.dumps({"backend": "sealed_memory"})),
        *("--worker-extension-cls", "sealed_weights.Registered"),
    )
    environment: Mapping[str, str] = {"PYTHONPATH": str(IN_WORKER)}

    @contextmanager
    def connected(self, server: WeightRoutes, spec: LaunchSpec) -> Iterator[MemoryConnection]:
        server.begin({"process": os.getpid()})
        yield MemoryConnection(server, served_shapes(spec))


@dataclass(frozen=True)
class MemoryConnection:
    """Connection to a vLLM whose workers map memory files. served: shapes of the server's weights by name."""

    server: WeightRoutes
    served: Mapping[str, tuple[int, ...]]

    def give(self, weights: HeldWeights) -> None:
        head_of = self._head_of(weights)
        check_same(weights, {name: shape for name, shape in self.served.items() if name not in head_of})
        self.server.start()
        for bucket in weights.buckets:
            self.server.update(self._message(bucket, head_of))
        self.server.finish()

    def _head_of(self, weights: HeldWeights) -> dict[str, str]:
        """Return which weight is the server's output head, too, where its folder was untied (`prepare_reloads`)."""
        from stages.serving.vllm.swap import tied_heads  # and aiohttp

        heads = tied_heads(weights.shapes)
        return {head: name for head, name in heads.items() if head in self.served and head not in weights.shapes}

    @staticmethod
    def _message(bucket: Bucket, head_of: Mapping[str, str]) -> dict[str, object]:
        also = [replace(one, name=head) for head, name in head_of.items() for one in bucket.weights if one.name == name]
        held = [*bucket.weights, *also]
        offsets = [one.offset for one in held]
        return {"descriptor": bucket.descriptor, "file_name": bucket.name, "offsets": offsets, **described(held)}
