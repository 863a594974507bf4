"""The real vLLM guesses tokens ahead, and answers as it would without; the stage says how many guesses were right."""

import json
import signal
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM

from stages.core.contract import StageResult
from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.fsdp.probe import packed
from stages.engines.settings import AdamSettings, EngineSettings
from stages.kinds.train.methods.sft import SftLoss
from stages.models.facts import ModelFacts
from stages.parallel.layout import Layout
from stages.serving.client import Client
from tests.mtp_models import save_with_mtp
from tests.pipeline.test_quantize import VOCABULARY, counting_rows, save_model, train
from tests.pipeline.test_quantize_families import quantize_family
from tests.serving import API_KEY, stage_process, wait_for, write_work

SERVING = {"dtype": "float32", "max_model_len": 64, "enforce_eager": True, "kv_cache_memory_gib": 0.0625}
BENCHMARK = {"concurrencies": [2], "requests_per_concurrency": 2, "input_tokens": 8, "output_tokens": 24}
PROMPTS = [row[:8] for row in counting_rows(4)]
NUM_TOKENS = 24
NUM_STEPS = 250


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """Provide the artifact of a small model that was trained to count, and repeats itself when it has counted up."""
    artifact = tmp_path_factory.mktemp("counting")
    save_model(train(counting_rows(600)), artifact / "model")
    return artifact


@contextmanager
def serving(folder, artifacts, **config):
    """Run a serve stage of the model `m`; provide its client and its result."""
    work = write_work(folder, "serve", {"model": "m", "serving": SERVING, "benchmark": None, **config}, artifacts)
    with stage_process(work) as process:
        wait_for(lambda: (work / "result.json").exists() or process.poll() is not None, what="the lease")
        assert process.poll() is None, (work / "log.txt").read_text()[-3000:]
        result = StageResult.model_validate_json((work / "result.json").read_text())
        assert result.lease
        yield Client(result.lease.url, API_KEY, "m"), result
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0


def answers(client, prompts=PROMPTS):
    """Return the server's greedy answers to the prompts, as texts."""
    return [client.complete(prompt, max_tokens=NUM_TOKENS, ignore_eos=True).text.strip() for prompt in prompts]


def greedy(artifact, prompts=PROMPTS):
    """Return Transformers' greedy answers to the prompts, as texts, in which the token of the end is not shown."""
    model = AutoModelForCausalLM.from_pretrained(artifact / "model", dtype=torch.float32)
    made = (
        model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False)
        for prompt in prompts
    )
    answered = (tokens[0, len(prompt) :].tolist() for tokens, prompt in zip(made, prompts, strict=True))
    return [" ".join(VOCABULARY[token] for token in tokens if token) for tokens in answered]


@pytest.mark.nightly
def test_a_draft_model_with_the_same_weights_is_always_right(counting, tmp_path):
    """`make test` has what a recipe may ask for, and the command (`test_speculative.py`, vLLM's `test_command.py`)."""
    inputs = {"m": counting, "d": counting}
    with serving(tmp_path, inputs, speculative={"draft": "d"}, benchmark=BENCHMARK) as (client, result):
        assert answers(client) == greedy(counting)
    # Random prompts, on which two likeliest tokens may be as good as equal.
    assert result.metrics["accepted_fraction_concurrency_2"] == pytest.approx(1, abs=0.02)
    launch = json.loads((tmp_path / "launch.json").read_text())
    assert launch["speculation"] == {"method": "draft", "draft": str(counting / "model")}


@pytest.mark.nightly
def test_tokens_that_repeat_are_guessed_from_those_before(counting, tmp_path):
    with serving(tmp_path, {"m": counting}, speculative="ngram", benchmark=BENCHMARK) as (client, result):
        assert answers(client) == greedy(counting)
        assert client.counter("vllm:spec_decode_num_accepted_tokens_total") > 0
    assert 0 <= result.metrics.get("accepted_fraction_concurrency_2", 0) <= 1


@pytest.mark.nightly
def test_a_quantized_model_guesses_by_its_own_mtp_layer(tmp_path):
    save_with_mtp("glm4_moe", tmp_path / "source")
    quantize_family(tmp_path / "source", tmp_path / "small/model", "fp8", ("lm_head", r"re:.*\.experts\."))
    answered = []
    for name, speculative in {"plain": None, "mtp": "mtp"}.items():
        with serving(tmp_path / name, {"m": tmp_path / "small"}, speculative=speculative) as (client, _):
            answered.append(answers(client))
            guessed = client.counter("vllm:spec_decode_num_draft_tokens_total")
        assert (guessed > 0) == (speculative == "mtp")
    assert answered[0] == answered[1]


def longer_rows():
    """Return rows that count on for longer than an answer, without token 0, which ends answers; int64 [8, tokens]."""
    starts, steps = torch.randint(0, 31, (8, 1)), torch.randint(1, 6, (8, 1))
    return 1 + (starts + steps * torch.arange(NUM_TOKENS + 12)) % 31


def teach(source, target, weight):
    """Teach a model to count, and with a weight above 0 its MTP layer too."""
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        settings = EngineSettings(Layout(), "fp32", AdamSettings(3e-3), mtp_loss_weight=weight)
        engine = FsdpEngine(ModelFacts(source), settings, torch.device("cpu"))
        for _ in range(NUM_STEPS):
            engine.train_step([packed([*longer_rows()])], SftLoss(), 3e-3, 1.0)
        engine.export(target, torch.float32)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.nightly
def test_an_mtp_layer_that_learned_with_the_model_guesses_right(tmp_path):
    save_with_mtp("glm4_moe", tmp_path / "source")
    prompts = longer_rows()[:4, :8].tolist()
    accepted = {}
    for weight in (0.0, 0.3):
        artifact = tmp_path / f"taught-{weight}"
        teach(tmp_path / "source", artifact / "model", weight)
        with serving(tmp_path / f"served-{weight}", {"m": artifact}, speculative="mtp") as (client, _):
            assert answers(client, prompts) == greedy(artifact, prompts)
            kinds = ("accepted", "draft")
            right, guessed = (client.counter(f"vllm:spec_decode_num_{kind}_tokens_total") for kind in kinds)
            accepted[weight] = right / guessed
    assert accepted[0.0] < 0.3
    assert accepted[0.3] > 0.9
