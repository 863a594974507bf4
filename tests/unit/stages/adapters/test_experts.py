"""Adapters on experts of a mixture are placed, written and merged as by PEFT; unsupported ones are refused."""

import re

import peft
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen3MoeConfig

from stages.adapters.check import loading_problem
from stages.adapters.config import AdapterConfig
from stages.adapters.effect import ChangedParameters, idle_experts
from stages.adapters.files import check_mergeable, read_adapter, write_adapter
from stages.adapters.lora import adapted_parameters, add_adapter, changed_weights, load_trained_adapter, merge_into
from stages.core.errors import ModelError

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
}
CONFIGS = {
    "qwen3-moe": Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=12),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "gpt-oss": GptOssConfig(**SIZES, num_local_experts=4),
}
ADAPTERS = {
    "all": ("qwen3-moe", {}),
    "named": ("qwen3-moe", {"target_modules": ("q_proj", "gate_proj", "up_proj", "down_proj"), "use_rslora": True}),
    "renamed": ("mixtral", {"layers_to_transform": (1,), "exclude_modules": ("gate",)}),
    "transposed": ("gpt-oss", {"target_parameters": ("experts.gate_up_proj", "experts.down_proj")}),
    "one": ("gpt-oss", {"target_modules": (), "target_parameters": ("down_proj",)}),
}
TOKENS = torch.arange(20)[None]


def make_model(name):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()


def adapted(name, **fields):
    model = make_model(name)
    return model, add_adapter(model, AdapterConfig(**{"rank": 3, **fields}), seed=0)


def learning(model):
    return {name: one.detach() for name, one in model.named_parameters() if one.requires_grad}


@pytest.fixture(params=ADAPTERS)
def trained(request, tmp_path):
    """Provide a folder with a base model and an adapter for it, and the model with that adapter."""
    name, fields = ADAPTERS[request.param]
    make_model(name).save_pretrained(tmp_path / "base")
    model, lora = adapted(name, **fields)
    for parameter in learning(model).values():
        parameter.normal_(std=0.3)
    write_adapter(tmp_path / "adapter", learning(model), lora.to_dict(), tmp_path / "base", torch.float32)
    check_mergeable(changed_weights(model), tmp_path / "base")
    return tmp_path, model


def load_base(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).eval()


def test_all_linear_is_what_peft_takes_it_for_experts_and_router_included():
    model, _ = adapted("qwen3-moe")
    oracle = peft.get_peft_model(make_model("qwen3-moe"), peft.LoraConfig(r=3, target_modules="all-linear"))
    expected = {name: one.shape for name, one in oracle.base_model.model.named_parameters() if one.requires_grad}
    assert {name: one.shape for name, one in learning(model).items()} == expected
    first = {name.removeprefix("model.layers.0.") for name in adapted_parameters(model).values() if ".0." in name}
    assert first == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"}


def test_what_is_left_out_is_left_out_of_parameters_too():
    everything, fields = "mlp.experts.", {"layers_to_transform": (1,), "exclude_modules": ("down_proj", "gate")}
    model, lora = adapted("qwen3-moe", **fields)
    assert list(adapted_parameters(model).values()) == [f"model.layers.1.{everything}gate_up_proj"]
    assert all(name.startswith("model.layers.1.") for name in learning(model))
    assert lora.target_parameters == [f"model.layers.1.{everything}gate_up_proj"]
    model, _ = adapted("qwen3-moe", exclude_modules=("experts", "gate"))
    assert not adapted_parameters(model)
    model, _ = adapted("qwen3-moe", target_modules=r".*\.0\.mlp\.experts\..*|.*\.1\.self_attn\.q_proj")
    assert len(adapted_parameters(model)) == 2
    assert {name.split(".")[2:4][0] + name.split(".")[3] for name in learning(model)} == {"0mlp", "1self_attn"}


def test_peft_loads_the_files_and_gives_the_same(trained):
    folder, model = trained
    assert loading_problem(folder / "adapter", folder / "base", trust_remote_code=False) is None
    loaded = peft.PeftModel.from_pretrained(load_base(folder), folder / "adapter").eval()
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    assert (load_base(folder)(TOKENS).logits - model(TOKENS).logits).abs().max().item() > 1e-3


def test_what_peft_would_leave_out_of_experts_or_miss_there_is_named(trained):
    folder, _ = trained
    file = folder / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if ".experts." in name and ".lora_B." in name)
    save_file({name: one for name, one in tensors.items() if name != lost}, file)
    problem = loading_problem(folder / "adapter", folder / "base", trust_remote_code=False)
    assert re.search(rf"PEFT, .*, would not load {lost} \(1 in all\), or would miss it", str(problem))


def test_merged_into_the_files_it_gives_the_same(trained):
    folder, model = trained
    adapter, file = read_adapter(folder / "adapter"), folder / "base" / "model.safetensors"
    parameters = ChangedParameters(adapter, load_base(folder))
    weights = load_file(file)
    for name in parameters.layers:
        weights[name] = parameters.merged(name, weights[name])
    for name in adapter.weights:
        weights[name] = adapter.merged(name, weights[name])
    save_file(weights, file, metadata={"format": "pt"})
    assert (load_base(folder)(TOKENS).logits - model(TOKENS).logits).abs().max().item() < 1e-5


def test_training_goes_on_with_them(trained):
    folder, model = trained
    expected = {name: one.clone() for name, one in learning(model).items()}
    for parameter in learning(model).values():
        parameter.zero_()
    load_trained_adapter(model, read_adapter(folder / "adapter"))
    with pytest.raises(ModelError, match="to stack another on it: it changes model"):
        merge_into(load_base(folder), read_adapter(folder / "adapter"))
    assert all(torch.equal(learning(model)[name], one) for name, one in expected.items())


def test_files_whose_config_does_not_name_each_parameter_are_refused(trained):
    folder, _ = trained
    config = folder / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace('"target_parameters": [', '"target_parameters": ["x.experts.other",'))
    with pytest.raises(
        ModelError, match=r"has x\.experts.* in one of its files only; expected every adapted parameter"
    ):
        read_adapter(folder / "adapter")


def test_experts_that_no_token_came_to_are_counted(tmp_path):
    model, lora = adapted("qwen3-moe", target_modules=(), target_parameters=("experts.down_proj",))
    for name, parameter in learning(model).items():
        if ".lora_B." in name:
            parameter.normal_()
            parameter.unflatten(1, (3, 4))[:, :, 2] = 0  # the third expert's
    write_adapter(tmp_path / "adapter", learning(model), lora.to_dict(), tmp_path, torch.float32)
    assert str(idle_experts(read_adapter(tmp_path / "adapter"))).startswith("2 of 8 adapters of experts have learned")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"target_parameters": ("experts.gate_proj",)},
            r"names experts.gate_proj, .* mlp.experts.down_proj, mlp.exper",
        ),
        ({"dropout": 0.1}, r"gate_up_proj.*: parameters, on which PEFT has no `dropout`"),
        ({"use_dora": True}, "PEFT has no `use_dora`"),
        ({"init": "pissa"}, "PEFT has no `init: pissa`"),
        ({"stack": "merge"}, "PEFT has no `stack`"),
        ({"target_modules": ("gate_proj",)}, "without also targeting up_proj because they are fused"),
        ({"rank": 13}, r"rank is 13, more than the width of .*experts \(12\)"),
    ],
)
def test_what_parameters_cannot_have_is_refused_by_name(fields, message):
    with pytest.raises(ModelError, match=message):
        adapted("qwen3-moe", **fields)


def test_a_router_may_have_fewer_experts_than_the_rank():
    model, _ = adapted("qwen3-moe", rank=6)
    assert learning(model)["model.layers.0.mlp.gate.lora_A.default.weight"].shape == (6, 16)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_modules": []}, "found nothing that could learn"),
        ({"target_parameters": ["a"], "dropout": 0.1}, "`target_parameters` does not go with `dropout`"),
        ({"target_parameters": ["a"], "base_precision": "nf4"}, "does not go with `base_precision: nf4`"),
    ],
)
def test_what_cannot_be_honoured_is_refused_when_a_recipe_is_read(fields, message):
    with pytest.raises(ValidationError, match=message):
        AdapterConfig.model_validate(fields)
