"""A GGUF file served by the real llama.cpp predicts what Transformers predicts with the original weights."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch
from refreshes import LIFECYCLE
from transformers import AutoModelForCausalLM

from flows.store.store import Store
from stages.core.contract import StageResult
from stages.hubs.builtin import qwen3
from stages.kinds.quantize.config import QuantizeConfig
from stages.kinds.quantize.gguf_file import quantize
from stages.kinds.quantize.registry import QuantizationJob
from stages.models.model_folder import GGUF_FILE
from stages.serving.client import Client
from stages.serving.engine import LaunchSpec
from stages.serving.registry import ENGINES
from tests.promotion import commit, planned_stages
from tests.serving import API_KEY, is_port_free, served_processes, stage_process, wait_for, write_work

SERVING = {"engine": "llama_cpp", "max_model_len": 512, "max_num_seqs": 2}
EVERY_TOKEN = list(range(288))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("llama_cpp")
    (root / "sft" / "model").mkdir(parents=True)
    qwen3.make(root / "sft" / "model")
    config = QuantizeConfig.model_validate(
        {"kind": "quantize", "model": "sft", "method": "gguf", "gguf_type": "f16", "calibration": {"dataset": "d"}}
    )
    (root / "small").mkdir()
    target = root / "small" / "model"
    rows = [[61, 75, 76], [19, 20]]
    options = {"seed": 0, "trust_remote_code": False, "report": lambda *_: None}
    quantize(QuantizationJob(root / "sft" / "model", target, config.quantization, rows, **options))
    return root


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[Client]:
    benchmark = {"concurrencies": [2], "requests_per_concurrency": 2, "input_tokens": 16, "output_tokens": 8}
    config = {"model": "small", "serving": SERVING, "benchmark": benchmark}
    work = write_work(root / "serve", "serve", config, {"small": root / "small"})
    with stage_process(work) as process:
        wait_for(lambda: (work / "result.json").exists() or process.poll() is not None, what="the lease")
        assert process.poll() is None, (work / "log.txt").read_text()[-3000:]
        result = StageResult.model_validate_json((work / "result.json").read_text())
        assert result.lease
        assert result.metrics["output_tokens_per_s_concurrency_2"] > 0
        yield Client(result.lease.url, API_KEY, "small")
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
    assert is_port_free(result.lease.url)
    assert not served_processes(root)


def test_every_token_is_as_likely_as_transformers_has_it(root: Path, client: Client) -> None:
    """llama.cpp's log-probabilities are Transformers', also of partial characters, which it reports indirectly."""
    model = AutoModelForCausalLM.from_pretrained(root / "sft" / "model", dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([EVERY_TOKEN])).logits[0, :-1].log_softmax(-1)

    (found,) = ENGINES["llama_cpp"].predictions(client, [EVERY_TOKEN])

    of_tokens = expected.gather(1, torch.tensor(EVERY_TOKEN[1:])[:, None]).squeeze(1)
    assert found.log_probabilities == pytest.approx(of_tokens.tolist(), abs=0.02)
    likeliest = expected.gather(1, torch.tensor(found.greedy)[:, None]).squeeze(1)
    assert likeliest.tolist() == pytest.approx(expected.max(1).values.tolist(), abs=0.02)


def test_only_what_the_proxy_passes_on_is_answered_and_only_with_the_key(root: Path, client: Client) -> None:
    spec = LaunchSpec.model_validate_json((root / "serve" / "launch.json").read_bytes())
    headers = {"Authorization": f"Bearer {API_KEY}"}

    assert httpx.get(f"{client.url}/v1/models").status_code == 401
    assert httpx.get(f"{client.url}/props", headers=headers).status_code == 404
    assert httpx.post(f"{client.url}/tokenize", headers=headers, json={"content": "a"}).status_code == 404
    metrics = httpx.get(f"{client.url}/metrics", headers=headers).text
    assert ENGINES["llama_cpp"].waiting_requests_metric in metrics
    assert ENGINES["llama_cpp"].context_tokens(client, spec) == SERVING["max_model_len"]
    assert [*client.chat([{"role": "user", "content": "What is 1 + 2?"}])]


def test_a_file_that_was_cut_off_is_named_as_the_cause(root: Path) -> None:
    broken = root / "broken" / "model"
    broken.mkdir(parents=True)
    for path in (root / "small" / "model").iterdir():
        content = path.read_bytes()
        (broken / path.name).write_bytes(content[: len(content) // 2] if path.name == GGUF_FILE else content)
    work = write_work(root / "fails", "serve", {"model": "broken", "serving": SERVING}, {"broken": root / "broken"})

    with stage_process(work) as process:
        assert process.wait(300) != 0

    error = json.loads((work / "error.json").read_text())
    assert error["error"] == "ServerError"
    assert "llama.cpp server for broken" in error["message"] and "not within the file bounds" in error["message"]
    assert API_KEY not in error["message"]


def copy_model(artifact: Path, work: Path) -> None:
    shutil.copytree(artifact / "model", work / "model")


def test_an_artifact_is_served_by_its_name_until_a_person_interrupts(root: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    quantized = {"kind": "quantize", "model": "sft", "method": "gguf", "calibration": {"dataset": "rows"}}
    stages = planned_stages(
        store,
        {
            "sft": {"kind": "download", "model": "builtin/qwen3-1m"},
            "rows": {"kind": "download", "dataset": "builtin/addition"},
            "small": {**quantized, "gguf_type": "f16"},
        },
    )
    built = {"sft": commit(store, stages["sft"], {}, partial(copy_model, root / "sft"))}
    built["rows"] = commit(store, stages["rows"], {}, lambda work: (work / "data").mkdir())
    commit(store, stages["small"], built, partial(copy_model, root / "small"))
    environment = {**os.environ, "LIFECYCLE_HOME": str(tmp_path), "VLLM_API_KEY": API_KEY}
    with subprocess.Popen([LIFECYCLE, "serve", "small"], env=environment, text=True, stdout=subprocess.PIPE) as process:
        try:
            url = next(line.split(" at ")[1].strip() for line in process.stdout if line.startswith("serving small "))
            assert Client(url.removesuffix("/v1"), API_KEY, "small").model_names() == ["small"]
            assert httpx.get(f"{url}/models").status_code == 401
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(300)
    assert process.returncode == 0
    assert is_port_free(url.removesuffix("/v1"))
    assert not served_processes(tmp_path)
