"""vLLM beside a GPU's training takes new weights while it runs, and answers with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.core.errors import ResourceError
from tests.gpu.device import needs_device
from tests.train_stage import make_artifacts, make_teacher

TOKENS = list(range(5, 69))
MOST_NATS = 0.1
"""Largest mean difference of a token's log-probability that counts as rounding to bf16 by other kernels."""


@needs_device
def test_a_reload_replaces_the_weights(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="nothing that serves is installed here")
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
    spec = new_launch_spec(models[0], "policy", serving).model_copy(update={"for_training": True})
    with started_server(spec, ServeExecution(), tmp_path / "server.log", tmp_path / "server") as server:
        server.wait_until_ready(150)
        for folder, values in zip(models, expected, strict=True):
            if folder != models[0]:
                server.engine.reload_weights(server.address, server.api_key, folder, 60)
            found = server.client.predictions([TOKENS])[0].log_probabilities
            assert (torch.tensor(found) - values).abs().mean() < MOST_NATS
