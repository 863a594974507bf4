"""FSDP2 with an adapter learns what PEFT learns in a loop over plain Transformers, in fp32, and writes its files."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stages.adapters.config import AdapterConfig
from stages.adapters.files import read_adapter
from tests.parity.test_fsdp import (
    data,
    learn_plainly,
    make_config,
    models,
    negative_log_likelihood,
    ranks,
)

__all__ = ["data", "models", "ranks"]

ADAPTERS = {
    "all": {"rank": 4, "alpha": 8},
    "some": {"rank": 3, "alpha": 5.5, "target_modules": ["q_proj", "down_proj"], "use_rslora": True},
    "layer": {"rank": 2, "target_modules": r".*layers\.\d+\.mlp\.(up|gate)_proj", "layers_to_transform": None},
}
LAYOUTS = {
    1: {"plain": {}, "accumulated": {"micro_batch_size": 1}, "recomputed": {"recompute": "full"}},
    2: {
        "sharded": {"dp_shard": 2},
        "replicated": {"dp_replicate": 2},
        "offloaded": {"dp_shard": 2, "cpu_offload": True},
    },
}
SEED = 3


@pytest.fixture(scope="module")
def plain(models, data):
    """Model and adapter → losses, gradient norms and PEFT's model after training."""
    cases = [("qwen3", name) for name in ADAPTERS] + [("untied", "all"), ("gpt2", "gpt2")]
    return {case: train_plainly(models / case[0], adapter_of(case[1]), data) for case in cases}


def adapter_of(name):
    return {"rank": 4, "alpha": 8} if name == "gpt2" else ADAPTERS[name]


def train_plainly(folder, adapter, data):
    adapter = AdapterConfig.model_validate(adapter)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(SEED)
    targets = adapter.target_modules
    config = peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=list(targets) if isinstance(targets, tuple) else targets,
        use_rslora=adapter.use_rslora,
        fan_in_fan_out=folder.name == "gpt2",
    )
    model = peft.get_peft_model(model, config)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return learn_plainly(model, [{"params": learning, "weight_decay": 0.0}], data)


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda processes: f"{processes}-processes")
def trained(request, ranks, models, data, tmp_path_factory):
    """Case → (output folder, key of `plain`), from one start of the processes."""
    layouts = LAYOUTS[request.param]
    first = next(iter(layouts))
    cases = {f"qwen3-all-{name}": ("qwen3", "all", name) for name in layouts}
    cases |= {f"qwen3-{name}": ("qwen3", name, first) for name in ADAPTERS if name != "all"}
    cases |= {"untied-all": ("untied", "all", first), "gpt2-gpt2": ("gpt2", "gpt2", first)}
    output = tmp_path_factory.mktemp("trained")
    told = {
        name: {"model": str(models / model), "config": config_of(adapter, layouts[layout])}
        for name, (model, adapter, layout) in cases.items()
    }
    told["half"] = {"model": str(models / "qwen3"), "config": {**config_of("all", layouts[first]), "precision": "bf16"}}
    (output / "spec.json").write_text(json.dumps({"data": data, "cases": told, "output": str(output)}))
    ranks.run("tests.parity.fsdp_program", request.param, output / "spec.json", log=output / "log.txt")
    return output, {name: (model, adapter) for name, (model, adapter, _) in cases.items()}


def config_of(adapter, layout):
    return {**make_config(layout), "adapter": adapter_of(adapter), "seed": SEED, "weight_decay": 0.0}


def test_losses_and_gradient_norms_equal_those_of_peft(trained, plain):
    output, cases = trained
    for name, case in cases.items():
        result = json.loads((output / f"{name}.json").read_text())
        losses, grad_norms, _ = plain[case]
        assert result["losses"] == pytest.approx(losses, rel=2e-6), name
        assert result["grad_norms"] == pytest.approx(grad_norms, rel=1e-5), name


def test_bf16_stays_as_close_to_fp32_as_its_eight_bits_allow(trained, plain):
    result = json.loads((trained[0] / "half.json").read_text())
    assert result["losses"] == pytest.approx(plain["qwen3", "all"][0], rel=2**-8)
    assert result["losses"] != pytest.approx(plain["qwen3", "all"][0], rel=1e-6)


def test_the_files_are_those_of_peft(trained, plain, models, tmp_path):
    output, cases = trained
    for name, case in cases.items():
        plain[case][2].save_pretrained(tmp_path / name)
        expected = load_file(tmp_path / name / "adapter_model.safetensors")
        written = load_file(output / name / "adapter_model.safetensors")
        assert written.keys() == expected.keys(), name
        for key, weight in expected.items():
            assert (written[key] - weight).abs().max().item() < 1e-6, (name, key)


def test_peft_loads_them_and_gives_what_training_gave(trained, models, data):
    output, cases = trained
    for name, (model, _) in cases.items():
        base = AutoModelForCausalLM.from_pretrained(models / model, dtype=torch.float32)
        loaded = peft.PeftModel.from_pretrained(base, output / name).eval()
        found = [-negative_log_likelihood(loaded, torch.tensor([one])).item() for one in data[0][0]]
        assert found == pytest.approx(json.loads((output / f"{name}.json").read_text())["log_probabilities"], rel=1e-5)


def test_the_change_is_the_one_that_peft_merges(trained, models):
    output, cases = trained
    for name, (model, _) in cases.items():
        base = AutoModelForCausalLM.from_pretrained(models / model, dtype=torch.float32)
        before = {key: weight.clone() for key, weight in base.state_dict().items()}
        merged = peft.PeftModel.from_pretrained(base, output / name).merge_and_unload().state_dict()
        adapter = read_adapter(output / name)
        for layer in adapter.factors:
            expected = merged[f"{layer}.weight"] - before[f"{layer}.weight"]
            assert (adapter.change(layer) - expected).abs().max().item() < 1e-6, (name, layer)
