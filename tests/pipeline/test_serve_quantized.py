"""The real vLLM serves a quantized mixture of experts, and predicts what Transformers predicts with its files."""

import signal

import pytest
import torch
from transformers import AutoModelForCausalLM

from stages.core.contract import StageResult
from stages.serving.client import Client
from tests.pipeline.test_quantize import counting_rows
from tests.pipeline.test_quantize_families import folder_of, quantize_family
from tests.serving import API_KEY, stage_process, wait_for, write_work

__all__ = ["folder_of"]

SERVING = {"dtype": "bfloat16", "max_model_len": 64, "enforce_eager": True, "kv_cache_memory_gib": 0.0625}
TOKENS = [token for row in counting_rows(4) for token in row][:48]


def log_probabilities(folder):
    """Return the model's log-probability of every test token but the first, computed with Transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0]


@pytest.mark.nightly
def test_a_mixture_is_served_with_quantized_attention_and_experts_as_they_are(folder_of, tmp_path):
    """vLLM serves a Mixtral with quantized attention and unquantized experts.

    Mixtral's experts are `mlp.experts.0.gate_proj` in memory, `block_sparse_moe.experts.0.w1` in files and vLLM.
    `make test` holds these names in files (`test_quantize_families.py`), and serves a quantized model (quickstart).
    """
    source, artifact = folder_of("mixtral"), tmp_path / "small"
    quantize_family(source, artifact / "model", "fp8", ("lm_head", r"re:.*\.experts\."))
    config = {"model": "small", "serving": SERVING, "benchmark": None}
    work = write_work(tmp_path / "serve", "serve", config, {"small": artifact})
    with stage_process(work) as process:
        wait_for(lambda: (work / "result.json").exists() or process.poll() is not None, what="the lease")
        assert process.poll() is None, (work / "log.txt").read_text()[-3000:]
        result = StageResult.model_validate_json((work / "result.json").read_text())
        assert result.lease
        served = torch.tensor(Client(result.lease.url, API_KEY, "small").log_probabilities(TOKENS))
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
    assert served.tolist() == pytest.approx(log_probabilities(artifact / "model").tolist(), abs=0.2)
    assert (served - log_probabilities(source)).abs().mean() < 0.1
