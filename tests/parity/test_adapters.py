"""Adapters trained with FSDP2 equal those that PEFT trains in a plain Transformers loop in fp32, files included."""

import copy
import json

import peft
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from stages.adapters.config import AdapterConfig
from stages.adapters.effect import ChangedParameters
from stages.adapters.files import read_adapter
from stages.adapters.quantized import Int8Linear, Nf4Linear
from tests.parity.test_fsdp import LEARNING_RATE, learn_plainly, make_config, make_data, models, negative_log_likelihood

__all__ = ["models"]

NUM_STEPS = [3, pytest.param(5, marks=pytest.mark.nightly)]
ADAPTERS = {
    "all": {"rank": 4, "alpha": 8},
    "some": {"rank": 3, "alpha": 5.5, "target_modules": ["q_proj", "down_proj"], "use_rslora": True},
    "layer": {"rank": 2, "target_modules": r".*layers\.\d+\.mlp\.(up|gate)_proj", "layers_to_transform": None},
    "dora": {"rank": 4, "alpha": 8, "use_dora": True},
    "pissa": {"rank": 3, "alpha": 4, "init": "pissa", "use_rslora": True},
    "olora": {"rank": 3, "alpha": 4, "init": "olora"},
    "loraplus": {"rank": 4, "alpha": 8, "loraplus_lr_ratio": 1.5},
    "saved": {"rank": 4, "alpha": 8, "modules_to_save": ["norm"]},
}
OF_OTHERS = {
    ("untied", "head"): {"rank": 4, "alpha": 8, "modules_to_save": ["lm_head", "embed_tokens"], "use_dora": True},
    ("gpt2", "gpt2"): {"rank": 4, "alpha": 8},
    ("gpt2", "gpt2-dora"): {"rank": 4, "alpha": 8, "use_dora": True},
    ("gpt2", "gpt2-pissa"): {"rank": 4, "alpha": 8, "init": "pissa"},
    ("wide", "nf4"): {"rank": 4, "alpha": 8, "base_precision": "nf4"},
    ("qwen3", "int8"): {"rank": 4, "alpha": 8, "base_precision": "int8"},
    ("qwen3", "bf16"): {"rank": 4, "alpha": 8, "base_precision": "bf16"},
    ("moe", "experts"): {"rank": 3, "alpha": 8},
    ("gpt-oss", "parameters"): {
        "rank": 3,
        "alpha": 5,
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "use_rslora": True,
        "loraplus_lr_ratio": 1.5,
    },
    ("gpt-oss", "down"): {"rank": 3, "target_modules": [], "target_parameters": ["experts.down_proj"]},
}
"""Adapter configs by model and name, for models other than Qwen3 and for quantized base models."""
CASES = {**{("qwen3", name): adapter for name, adapter in ADAPTERS.items()}, **OF_OTHERS}
LAYOUTS = {
    1: {
        "plain": {},
        "accumulated": {"micro_batch_size": 1},
        "recomputed": {"recompute": "full"},
    },
    2: {
        "sharded": {"dp_shard": 2},
        "replicated": {"dp_replicate": 2},
        "offloaded": {"dp_shard": 2, "cpu_offload": True},
        "split": {"tp": 2},
        "split-tokens": {"tp": 2, "sequence_parallel": True},
        "sliced": {"cp": 2},
    },
    4: {
        "split-sharded": {"dp_shard": 2, "tp": 2, "micro_batch_size": 1, "recompute": "full"},
        "sliced-sharded": {"dp_shard": 2, "cp": 2, "micro_batch_size": 1},
        "split-sharded-tokens": {
            "dp_shard": 2,
            "tp": 2,
            "sequence_parallel": True,
            "micro_batch_size": 1,
            "recompute": "full",
        },
    },
}
PROCESSES = [1, 2, pytest.param(4, marks=pytest.mark.nightly)]
RESHARDED = (("split", "sharded"), ("sharded", "split"))
"""Names of layouts that write a checkpoint, and of those that go on from it."""
ROUNDED = {"nf4": Nf4Linear, "int8": Int8Linear}
SEED = 3


@pytest.fixture(scope="module")
def folders(models):
    """Provide tiny models' folders: one with rows as long as an NF4 block, one with transposed, square experts."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    config = Qwen3Config(**sizes, num_hidden_layers=2, intermediate_size=128, initializer_range=0.2)
    Qwen3ForCausalLM(config).save_pretrained(models / "wide")
    sizes |= {"hidden_size": 24, "head_dim": 8, "intermediate_size": 24, "max_position_embeddings": 64}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None}
    config = GptOssConfig(**sizes, **experts, num_hidden_layers=2, initializer_range=0.2)
    GptOssForCausalLM(config).save_pretrained(models / "gpt-oss")
    return models


@pytest.fixture(scope="module", params=NUM_STEPS)
def data(request):
    return make_data(request.param)


@pytest.fixture(scope="module")
def plain(folders, data):
    """Provide PEFT's results by model and adapter: losses, gradient norms, and the model after training."""
    return {case: train_plainly(folders / case[0], adapter, data) for case, adapter in CASES.items()}


def train_plainly(folder, adapter, data):
    adapter = AdapterConfig.model_validate(adapter)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    round_base(model, adapter.base_precision)
    torch.manual_seed(SEED)
    targets = adapter.target_modules
    config = peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=list(targets) if isinstance(targets, tuple) else targets,
        target_parameters=list(adapter.target_parameters) or None,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        init_lora_weights=True if adapter.init == "default" else adapter.init,
        modules_to_save=list(adapter.modules_to_save) or None,
        fan_in_fan_out=folder.name == "gpt2",
    )
    model = peft.get_peft_model(model, config)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": learning, "weight_decay": 0.0}]
    if adapter.loraplus_lr_ratio:
        ratio = adapter.loraplus_lr_ratio
        made = create_loraplus_optimizer(model, torch.optim.AdamW, lr=LEARNING_RATE, loraplus_lr_ratio=ratio)
        groups = [{"params": one["params"], "lr": one["lr"], "weight_decay": 0.0} for one in made.param_groups]
    return learn_plainly(model, groups, data)


@torch.no_grad()
def round_base(model, precision):
    """Round a base model's weights to the values that quantization gives them, but keep them in fp32."""
    if precision in ROUNDED:
        for layer in (one for one in model.model.modules() if isinstance(one, torch.nn.Linear)):
            layer.weight.copy_(ROUNDED[precision](layer).weight)
    elif precision == "bf16":
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())


def splits(case):
    """Return whether a case's matrices can be split: its family has a plan, and its base is not quantized."""
    return case[0] not in ("gpt2", "gpt-oss") and CASES[case].get("base_precision") not in ROUNDED


@pytest.fixture(scope="module", params=PROCESSES, ids=lambda processes: f"{processes}-processes")
def trained(request, fsdp_ranks, folders, data, tmp_path_factory):
    """Provide the output folder of adapters trained under all layouts, and each case's model and adapter."""
    layouts = LAYOUTS[request.param]
    first = next(iter(layouts))
    cases = {f"qwen3-all-{name}": ("qwen3", "all", name) for name in layouts}
    cases |= {f"{model}-{name}": (model, name, first) for model, name in CASES if name != "all"}
    output = tmp_path_factory.mktemp("trained")
    if request.param == 4:
        cases = {name: case for name, case in cases.items() if splits(case[:2])}
        cases["wide-nf4-sliced-sharded"] = ("wide", "nf4", "sliced-sharded")
    else:
        third = list(layouts)[2]
        cases |= {f"qwen3-dora-{third}": ("qwen3", "dora", third), f"wide-nf4-{third}": ("wide", "nf4", third)}
        cases["moe-experts-recomputed"] = ("moe", "experts", third)
        if request.param == 2:
            cases["wide-nf4-sliced"] = ("wide", "nf4", "sliced")
    if request.param == 2 and len(data) > NUM_STEPS[0]:  # nightly
        cases |= {f"{'-'.join(case)}-split": (*case, "split") for case in CASES if splits(case)}
        in_tokens = [case for case in CASES if splits(case) and case[0] != "moe"]
        cases |= {f"{'-'.join(case)}-split-tokens": (*case, "split-tokens") for case in in_tokens}
    given = {
        name: {"model": str(folders / model), "config": config_of((model, adapter), layouts[layout])}
        for name, (model, adapter, layout) in cases.items()
    }
    if request.param == 2:
        for writer, reader in RESHARDED:
            checkpoint = [1, str(output / f"checkpoint-{writer}")]
            given[f"qwen3-all-{writer}"]["save"] = checkpoint
            given[f"resumed-{reader}"] = {**given[f"qwen3-all-{reader}"], "resume": checkpoint}
            given[f"resumed-{reader}"].pop("save", None)
    half = {**config_of(("qwen3", "all"), layouts[first]), "precision": "bf16"}
    given["half"] = {"model": str(folders / "qwen3"), "config": half}
    (output / "spec.json").write_text(json.dumps({"data": data, "cases": given, "output": str(output)}))
    fsdp_ranks.run("tests.parity.fsdp_program", request.param, output / "spec.json", log=output / "log.txt")
    return output, {name: (model, adapter) for name, (model, adapter, _) in cases.items()}


def config_of(case, layout):
    return {**make_config(layout), "adapter": CASES[case], "seed": SEED, "weight_decay": 0.0}


def of_exact_bases(cases):
    """Return the cases with unquantized base: an adapter of a quantized one is merged into the exact base."""
    return [(name, case) for name, case in cases.items() if "base_precision" not in CASES[case]]


def merged_weights(model):
    """Return a PeftModel's fp32 weights after merging the adapter; the model itself is not changed."""
    return copy.deepcopy(model).merge_and_unload().state_dict()


def test_losses_and_gradient_norms_equal_those_of_peft(trained, plain):
    output, cases = trained
    for name, case in cases.items():
        result = json.loads((output / f"{name}.json").read_text())
        losses, grad_norms, _ = plain[case]
        assert result["losses"] == pytest.approx(losses, rel=0, abs=1e-6), name
        assert result["grad_norms"] == pytest.approx(grad_norms, rel=1e-5), name


def test_they_go_on_under_another_layout(trained):
    output, cases = trained
    for writer, reader in RESHARDED if "qwen3-all-split" in cases else ():
        saved, resumed = (
            json.loads((output / f"{name}.json").read_text()) for name in (f"qwen3-all-{writer}", f"resumed-{reader}")
        )
        assert resumed["losses"] == pytest.approx(saved["losses"][1:], rel=0, abs=1e-6)
        tensors, others = (
            load_file(output / name / "adapter_model.safetensors")
            for name in (f"qwen3-all-{writer}", f"resumed-{reader}")
        )
        assert max((tensors[name] - one).abs().max().item() for name, one in others.items()) < 1e-6


def test_gradients_equal_those_of_peft(trained, plain):
    output, cases = trained
    for name, case in cases.items():
        found, expected = load_file(output / f"{name}.gradients.safetensors"), plain[case][2].first_gradients
        for key, gradient in expected.items():
            one = found[key.removeprefix("base_model.model.").replace("modules_to_save.default.", "")]
            assert (one - gradient).abs().max().item() < 1e-6, (name, key)
        assert len(found) == len(expected), name


def test_bf16_stays_as_close_to_fp32_as_its_eight_bits_allow(trained, plain):
    result = json.loads((trained[0] / "half.json").read_text())
    assert result["losses"] == pytest.approx(plain["qwen3", "all"][0], rel=2**-8)
    assert result["losses"] != pytest.approx(plain["qwen3", "all"][0], rel=1e-6)


def test_the_files_are_those_of_peft(trained, plain, folders, tmp_path):
    output, cases = trained
    for name, case in cases.items():
        if "init" in CASES[case]:
            continue  # PEFT's files are of a base that it changed
        plain[case][2].save_pretrained(tmp_path / name)
        expected = load_file(tmp_path / name / "adapter_model.safetensors")
        written = load_file(output / name / "adapter_model.safetensors")
        assert written.keys() == expected.keys(), name
        for key, weight in expected.items():
            assert (written[key] - weight).abs().max().item() < 1e-6, (name, key)


def test_peft_loads_them_and_gives_what_training_gave(trained, folders, data):
    output, cases = trained
    for name, (model, _) in of_exact_bases(cases):
        base = AutoModelForCausalLM.from_pretrained(folders / model, dtype=torch.float32)
        loaded = peft.PeftModel.from_pretrained(base, output / name).eval()
        found = [-negative_log_likelihood(loaded, torch.tensor([one])).item() for one in data[0][0]]
        assert found == pytest.approx(json.loads((output / f"{name}.json").read_text())["log_probabilities"], rel=1e-5)


def test_merged_they_are_what_peft_trained_and_merged(trained, plain, folders):
    output, cases = trained
    for name, case in of_exact_bases(cases):
        base = AutoModelForCausalLM.from_pretrained(folders / case[0], dtype=torch.float32)
        before, expected = (
            revert_weight_conversion(base, one) for one in (base.state_dict(), merged_weights(plain[case][2]))
        )
        adapter = read_adapter(output / name)
        parameters = ChangedParameters(adapter, base)
        changing = {**dict.fromkeys(adapter.weights, adapter), **dict.fromkeys(parameters.layers, parameters)}
        for key, weight in before.items():
            merged = changing[key].merged(key, weight) if key in changing else weight
            assert (merged - expected[key]).abs().max().item() < 2e-6, (name, key)
        assert all((expected[key] - before[key]).abs().max().item() > 1e-4 for key in adapter.weights), name


@pytest.mark.nightly
@pytest.mark.parametrize("data", [5], indirect=True)
def test_compiled_it_learns_the_same_beside_a_base_in_4_bits(fsdp_ranks, data, tmp_path):
    """Training of an adapter on a 4-bit base model gives the same results compiled as uncompiled.

    It has one layer with two adapted projections, since compiling takes long.
    Quick tests of the same: here uncompiled, `test_fsdp.py` without adapter."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    config = Qwen3Config(**sizes, num_hidden_layers=1, intermediate_size=64, initializer_range=0.2)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    adapter = {"rank": 4, "target_modules": ["q_proj", "down_proj"], "base_precision": "nf4"}
    cases = {
        name: {"model": str(tmp_path / "model"), "config": {**make_config(layout), "adapter": adapter, "seed": SEED}}
        for name, layout in {"plain": {}, "compiled": {"compile": True}}.items()
    }
    (tmp_path / "spec.json").write_text(json.dumps({"data": data, "cases": cases, "output": str(tmp_path)}))
    fsdp_ranks.run("tests.parity.fsdp_program", 1, tmp_path / "spec.json", log=tmp_path / "log.txt")
    plain, compiled = (json.loads((tmp_path / f"{name}.json").read_text())["losses"] for name in cases)
    assert compiled == pytest.approx(plain, rel=0, abs=1e-6)
    assert plain[-1] != pytest.approx(plain[0], abs=1e-2)
