"""vLLM beside a GPU's training takes new weights while it runs, by folder and by IPC, and answers with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from stages.core.errors import ResourceError
from stages.parallel.accelerator import free_bytes, type_at_hand
from stages.serving.held_weights import HeldWeights
from stages.serving.vllm.transfers import ipc
from tests.gpu.device import needs_device
from tests.train_stage import make_artifacts, make_teacher

if TYPE_CHECKING:  # whose HTTP library the kit's environment may lack
    from stages.serving.server import Server

TOKENS = list(range(5, 69))
GPU_SHARE = 0.3
MAPS_BUFFER = """
import json, sys
import torch
from shared_buffers import arguments_of
from torch.multiprocessing.reductions import rebuild_cuda_tensor
content = rebuild_cuda_tensor(*arguments_of(json.load(sys.stdin)))
print(json.dumps([str(torch.cuda.get_device_properties(0).uuid), bytes(content.cpu()).hex()]))
"""
MOST_NATS = 0.1
"""Largest mean difference of a token's log-probability that counts as rounding to bf16 by other kernels."""


@needs_device
def test_a_reload_replaces_the_weights(tmp_path: Path) -> None:
    for name in ("aiohttp", "httptools"):
        pytest.importorskip(name, reason="nothing that serves is installed here")
    from transformers import AutoModelForCausalLM

    from stages.serving.config import ServeExecution, ServingConfig
    from stages.serving.registry import chosen_engine, new_launch_spec
    from stages.serving.server import started_server
    from stages.serving.vllm.engine import find_vllm

    try:
        find_vllm()
    except ResourceError as error:
        pytest.skip(str(error))
    artifacts = make_artifacts(tmp_path)
    models = [artifacts["base"] / "model", make_teacher(artifacts, tmp_path / "other") / "model"]
    serving = ServingConfig(dtype="bfloat16", max_model_len=256, kv_cache_memory_gib=1, enforce_eager=True)
    engine = chosen_engine(serving)
    expected = []
    for folder in models:
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([TOKENS])).logits
        expected.append(logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0])
        engine.prepare_reloads(folder)
    assert (expected[0] - expected[1]).abs().mean() > 2 * MOST_NATS
    way = engine.weight_transfer(type_at_hand().name, "colocated")
    shared = {"for_training": True, "sleeps": True, "gpu_share": GPU_SHARE, "weight_transfer": way}
    spec = new_launch_spec(models[0], "policy", serving).model_copy(update=shared)
    with started_server(spec, ServeExecution(), tmp_path / "server.log", tmp_path / "server") as server:
        server.wait_until_ready(150)
        for folder, values in zip(models, expected, strict=True):
            if folder != models[0]:
                server.engine.reload_weights(server.address, server.api_key, folder, 60)
            assert _difference(server, values) < MOST_NATS
        awake = free_bytes(torch.device("cuda"))
        server.engine.sleep(server.address, server.api_key, 60, keeps_weights=False)
        assert free_bytes(torch.device("cuda")) > awake + serving.kv_cache_memory_gib * 2**30 * 0.9
        server.engine.wake_up(server.address, server.api_key, "weights", 60)
        server.engine.reload_weights(server.address, server.api_key, models[0], 60)
        server.engine.wake_up(server.address, server.api_key, "kv_cache", 60)
        assert _difference(server, expected[0]) < MOST_NATS
        if spec.weight_transfer:
            with engine.connected(server.address, server.api_key, spec, 60) as connection:
                held = HeldWeights.gather(load_file(models[1] / "model.safetensors").items())
                connection.give(held)
                held.close()
            assert _difference(server, expected[1]) < MOST_NATS


@needs_device
def test_another_process_maps_weights_on_the_same_gpu() -> None:
    """The handle of a buffer, sent as JSON, gives the other process the bytes; without vLLM, which does the same."""
    if torch.version.hip or torch.accelerator.current_accelerator() != torch.device("cuda"):
        pytest.skip("CUDA IPC is of NVIDIA's GPUs")
    held = HeldWeights.gather([("a", torch.arange(1000, dtype=torch.float32))])
    (bucket,) = held.buckets
    buffer = ipc.staged(bucket, 0)
    uuid, handle = ipc.handle_of(buffer)
    ended = subprocess.run(
        [sys.executable, "-c", MAPS_BUFFER],
        input=json.dumps(handle),
        env={**os.environ, "PYTHONPATH": str(ipc.IN_WORKER)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert json.loads(ended.stdout) == [uuid, bytes(bucket.content()).hex()]
    held.close()


def _difference(server: Server, values: torch.Tensor) -> float:
    """Return the mean |Δ log-probability| of the tokens between a server and given values."""
    found = server.client.predictions([TOKENS])[0].log_probabilities
    return (torch.tensor(found) - values).abs().mean().item()
