"""Each quantization method keeps a trained model's predictions, and writes weights within its rounding error."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from stages.core.contract import FINDING_TAG, StageInput
from stages.kinds.quantize.divergence import measure_divergence
from tests.forked_stages import warm_parent

VOCABULARY = [f"n{number}" for number in range(32)]
GROUP_SIZE = 32
KL_BOUNDS = {"awq": 0.02, "gptq": 0.02, "int8": 0.002, "fp8": 0.01}
"""Largest KL divergence from the original, in nats per token: twice that of round-to-nearest, far below 3 bits'."""

SERVED_SHAPES = [
    (input_size, output_size, group_size)
    for input_size in (48, 64, 96, 256)
    for output_size in (24, 32, 48, 64)
    for group_size in (3, 16, 32, 48)
]
ASK_VLLM = """
import gc
gc.disable()  # a fifth of vLLM's import
import json, sys, torch
from vllm.distributed.utils import verify_group_size_divides_partition
from vllm.model_executor.kernels.linear import MPLinearLayerConfig
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.scalar_type import scalar_types

def served(input_size, output_size, group_size):
    shape = (input_size, output_size)
    try:
        verify_group_size_divides_partition(input_size, group_size)
    except Exception:
        return False
    config = MPLinearLayerConfig(shape, shape, scalar_types.uint4, torch.bfloat16, group_size, True)
    return CPUWNA16LinearKernel.can_implement(config)[0]

print(json.dumps([served(*shape) for shape in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Provide a folder with a Qwen3 of 0.15M parameters, trained on counting sequences, and its training rows."""
    folder = tmp_path_factory.mktemp("quantize")
    rows = counting_rows(600)
    (folder / "rows/data").mkdir(parents=True)
    texts = [json.dumps({"text": " ".join(VOCABULARY[token] for token in row)}) for row in rows]
    (folder / "rows/data/train.jsonl").write_text("\n".join(texts))
    save_model(train(rows), folder / "model/model")
    return folder


def counting_rows(num_rows):
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, 32, (num_rows, 1), generator=generator)
    steps = torch.randint(1, 6, (num_rows, 1), generator=generator)
    lengths = torch.randint(10, 16, (num_rows,), generator=generator)
    rows = (starts + steps * torch.arange(16)) % 32
    return [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]


def train(rows):
    """Train the small model on one thread, since two threads would wait for each other on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = taught_model(rows)
    torch.set_num_threads(num_threads)
    return model


def taught_model(rows):
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=32, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=True,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    tokens = torch.tensor([row[:10] for row in rows])
    for step in range(120):
        batch = tokens[torch.arange(step * 64, step * 64 + 64) % len(tokens)]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def save_model(model, folder):
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="n0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="n0", eos_token="n0", chat_template="{{ messages }}"
    ).save_pretrained(folder)


WARM = "tests.warm_quantize_stage"
WITH_ROUNDING = """
from stages.kinds.quantize.registry import METHODS, MethodEntry
METHODS["round"] = MethodEntry("int8", "tests.rounding_quantizer")
from stages.__main__ import main
main()
"""


def quantize(home, name, **fields):
    """Run a quantize stage in the work folder `home/name`, forked from a process that has made its imports."""
    work = new_work(home, name, **fields)
    environment = json.dumps({**os.environ, "OMP_NUM_THREADS": "1"})
    warm_parent(WARM).run(WARM, 1, work, environment, log=work / "log")


def new_work(home, name, **fields):
    """Make the work folder of a quantize stage with its `config.json`, and return it."""
    work = home / name
    work.mkdir()
    calibration = {"dataset": "rows", "num_samples": 64, "num_evaluation_samples": 64, "sequence_length": 32}
    groups = {"group_size": GROUP_SIZE} if fields["method"] in ("awq", "gptq") else {}
    config = {"kind": "quantize", "model": "model", "calibration": calibration, **groups, **fields}
    stage_input = StageInput(
        name=name, kind="quantize", version="0" * 12, config=config, cache=home / "cache",
        inputs={"model": home / "model", "rows": home / "rows"},
    )  # fmt: skip
    (work / "config.json").write_text(stage_input.model_dump_json())
    return work


@pytest.fixture(scope="module")
def built(home):
    """Provide a folder that holds, for each quantization method, the work folder of a finished quantize stage."""
    for method in KL_BOUNDS:
        quantize(home, method, method=method)
    return home


@pytest.fixture(scope="module")
def original(built):
    return AutoModelForCausalLM.from_pretrained(built / "model/model", dtype=torch.float32)


def reload(folder):
    """Load a quantized model and run it once, since Transformers dequantizes its weights on the first forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3]]))
    return model


def metrics(work: Path) -> dict[str, float]:
    return json.loads((work / "result.json").read_text())["metrics"]


def kl_of(home, folder):
    rows = counting_rows(50)
    everything = [[True] * len(row) for row in rows]
    divergence = measure_divergence(
        home / "model/model", folder, rows, everything, trust_remote_code=False, report=lambda *_: None
    )
    return divergence.metrics()["kl_nats_per_token"]


@pytest.mark.parametrize("method", KL_BOUNDS)
def test_little_is_lost_and_the_figures_say_so(built, method):
    figures = metrics(built / method)
    assert 0 < figures["kl_nats_per_token"] < KL_BOUNDS[method]
    assert figures["perplexity_before"] < 8, "a model that has learned nothing shows no loss"
    assert figures["perplexity_after"] == pytest.approx(figures["perplexity_before"], rel=0.05)
    sizes = [(built / folder / "model.safetensors").stat().st_size for folder in ("model/model", f"{method}/model")]
    assert [figures["size_before_mib"], figures["size_after_mib"]] == [size / 2**20 for size in sizes]
    assert figures["compression"] == pytest.approx(sizes[0] / sizes[1])
    assert figures["compression"] > (5 if method in ("awq", "gptq") else 3)


@pytest.mark.parametrize("method", KL_BOUNDS)
def test_what_lies_beside_the_weights_is_kept_and_readable_by_all(built, method):
    source, target = built / "model/model", built / method / "model"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert stat.S_IMODE((target / "model.safetensors").stat().st_mode) & 0o444 == 0o444
    config = json.loads((target / "config.json").read_text())
    assert config["dtype"] == "bfloat16", "vLLM's 4-bit kernels do not take float32"
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert config["tie_word_embeddings"]


@pytest.mark.parametrize("method", KL_BOUNDS)
def test_only_linear_layers_are_quantized(built, method, original):
    tensors = load_file(built / method / "model/model.safetensors")
    embedding = original.model.embed_tokens.weight.detach().bfloat16()
    assert torch.equal(tensors["model.embed_tokens.weight"], embedding)
    quantized = {name.rpartition(".weight_scale")[0] for name in tensors if name.endswith(".weight_scale")}
    linear = {name for name, module in original.named_modules() if isinstance(module, torch.nn.Linear)}
    assert quantized == linear - {"lm_head"}


def test_fp8_weights_are_within_half_a_step(built, original):
    """FP8 e4m3 weights differ by at most half a step: 2⁻⁴ of the value (3 bits of mantissa) + 2⁻⁸ (bf16 scales)."""
    written = reload(built / "fp8/model")
    for name, module in original.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            weight, found = module.weight, written.get_submodule(name).weight
            smallest = weight.abs().amax(1, keepdim=True) / 448 * 2**-9
            assert ((found - weight).abs() <= weight.abs() * (2**-4 + 2**-8) + smallest).all(), name


def test_awq_weights_are_within_half_a_step_of_the_scaled_originals(built, original):
    """AWQ weights, whose scales the norm is divided by, differ from scaled originals by at most half a step."""
    written, tensors = reload(built / "awq/model"), load_file(built / "awq/model/model.safetensors")
    for layer, quantized in zip(original.model.layers, written.model.layers, strict=True):
        scaling = (layer.input_layernorm.weight / quantized.input_layernorm.weight).detach()
        for name in ("q_proj", "k_proj", "v_proj"):
            expected = getattr(layer.self_attn, name).weight * scaling
            index = f"model.layers.{layer.self_attn.layer_idx}.self_attn.{name}.weight_scale"
            step = tensors[index].float().repeat_interleave(GROUP_SIZE, dim=1)
            error = (getattr(quantized.self_attn, name).weight - expected).abs()
            if name != "v_proj":  # which is scaled by o_proj's as well
                assert (error <= 0.55 * step + expected.abs() * 2**-7).all(), index


def test_a_damaged_export_shows_as_divergence(built, tmp_path):
    damaged = shutil.copytree(built / "awq/model", tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight_scale"] *= 3
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    assert kl_of(built, built / "model/model") == pytest.approx(0, abs=1e-6)
    assert kl_of(built, damaged) > 10 * kl_of(built, built / "awq/model")


def test_the_same_seed_gives_the_same_weights_and_the_gate_closes_after_the_figures_are_logged(built):
    quantize(built, "awq-again", method="awq", max_kl=1e-9)
    first, second = (load_file(built / name / "model/model.safetensors") for name in ("awq", "awq-again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    finding = json.loads((built / "awq-again/result.json").read_text())["tags"][FINDING_TAG]
    logged = json.loads((built / "awq-again/metrics.jsonl").read_text())
    assert finding.startswith("GateError: ")
    assert f"{logged['kl_nats_per_token']:.4f} nats per token" in finding
    assert "max_kl is 1e-09; it differs most before 'n" in finding


def test_progress_and_milestones_are_told(built):
    events = [json.loads(line) for line in (built / "awq/events.jsonl").read_text().splitlines()]
    progress = [(event["message"], event["done"]) for event in events if event["event"] == "progress"]
    assert [done for message, done in progress if message == "calibrating"] == [0, 1]
    assert progress[-1][1] == [event for event in events if event["event"] == "progress"][-1]["total"]
    milestones = [event["message"] for event in events if event["event"] == "milestone"]
    assert milestones[0].startswith("quantizing 14 layers with awq, calibrated with")
    assert milestones[1].startswith("wrote the quantized model: ")


def test_a_quantizer_is_its_module_and_a_line_of_the_registry(home):
    """A new quantization method works in all steps of the quantize stage once it is added to the registry."""
    work = new_work(home, "rounded", method="round")
    with (work / "log").open("w") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, "-c", WITH_ROUNDING, work], stdout=log, stderr=log, env=environment)
    assert done.returncode == 0, (work / "log").read_text()

    result = json.loads((home / "rounded/result.json").read_text())
    assert 0 < result["metrics"]["kl_nats_per_token"] < KL_BOUNDS["int8"]
    assert result["metrics"]["compression"] == pytest.approx(2, rel=0.05)
    assert result["tags"]["method"] == "round"
    assert "quantizing 14 layers with round" in (home / "rounded/events.jsonl").read_text()


def test_shapes_are_judged_as_the_cpu_kernel_of_vllm_judges_them():
    from stages.core.errors import RecipeError
    from stages.models.linear_layers import Projection
    from stages.serving.engine import Quantization
    from stages.serving.vllm.servability import check_servable

    def judged(input_size, output_size, group_size):
        quantization = Quantization("gptq", "int4", group_size, symmetric=False, ignore=(), tensor_parallel_size=1)
        try:
            check_servable([Projection("layers.0.dense", output_size, input_size)], None, quantization, "cpu")
        except RecipeError:
            return False
        return True

    vllm_python = Path(__file__).parents[2] / ".venv-serve/bin/python"
    asked = subprocess.run(
        [vllm_python, "-c", ASK_VLLM, json.dumps(SERVED_SHAPES)], capture_output=True, text=True, check=True
    )
    answers = json.loads(asked.stdout.splitlines()[-1])
    assert [judged(*shape) for shape in SERVED_SHAPES] == answers
    assert any(answers)
    assert not all(answers)
