"""Adapters are put on the layers that a recipe names; for unknown names, the error lists the model's layers."""

import copy
import math
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import Linear as LoraLinear
from pydantic import ValidationError
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, Llama4TextConfig, Qwen3Config

from flows.recipe.recipe import load_stages
from stages.adapters.check import loading_problem
from stages.adapters.config import AdapterConfig
from stages.adapters.effect import changing, has_effect, idle_layers
from stages.adapters.files import check_mergeable, read_adapter, write_adapter
from stages.adapters.lora import adapted_layers, add_adapter, changed_weights, factors_of, store_base
from stages.adapters.lora_linear import FusedLoraLinear, fuse_products
from stages.core.errors import ModelError
from stages.models.transformers_flops import model_flops

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def make_model(**fields):
    torch.manual_seed(0)
    config = Qwen3Config(**{**SIZES, "num_key_value_heads": 1, "intermediate_size": 24, **fields})
    return AutoModelForCausalLM.from_config(config)


def adapted(model=None, **fields):
    model = model or make_model()
    add_adapter(model, AdapterConfig(rank=4, **fields), seed=0)
    return model


def ends(model):
    return {name.rpartition(".")[2] for name in adapted_layers(model)}


def test_all_linear_is_every_layer_but_the_head():
    model = adapted(make_model(tie_word_embeddings=False))
    assert ends(model) == PROJECTIONS
    assert len(adapted_layers(model)) == 2 * len(PROJECTIONS)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"target_modules": ("q_proj", "v_proj")}, {"q_proj", "v_proj"}),
        ({"target_modules": r".*\.mlp\..*_proj"}, {"gate_proj", "up_proj", "down_proj"}),
        ({"exclude_modules": ("gate_proj",)}, PROJECTIONS - {"gate_proj"}),
    ],
)
def test_layers_are_chosen_by_name(fields, expected):
    assert ends(adapted(**fields)) == expected


def test_layers_are_chosen_by_number():
    model = adapted(layers_to_transform=(1,), target_modules=("q_proj",))
    assert list(adapted_layers(model)) == ["model.layers.1.self_attn.q_proj"]


@pytest.mark.parametrize(
    ("targets", "expected"), [("all-linear", PROJECTIONS), (r".*\.(q|gate)_proj", {"q_proj", "gate_proj"})]
)
def test_layers_are_chosen_by_number_beside_a_pattern_too_which_peft_itself_refuses(targets, expected, tmp_path):
    model = adapted(make_model(tie_word_embeddings=False), layers_to_transform=(1,), target_modules=targets)
    assert {name.partition(".layers.")[2][0] for name in adapted_layers(model)} == {"1"}
    assert ends(model) == expected


def test_only_the_adapter_learns_and_the_base_keeps_the_precision_of_its_computation():
    model = adapted()
    store_base(model, None, torch.bfloat16)
    learning = {name: one.dtype for name, one in model.named_parameters() if one.requires_grad}
    assert all(".lora_" in name for name in learning)
    assert set(learning.values()) == {torch.float32}
    assert {one.dtype for one in model.parameters() if not one.requires_grad} == {torch.bfloat16}


def test_it_is_the_base_until_it_learns_and_its_seed_decides_what_it_starts_from():
    tokens = torch.arange(8)[None]
    assert torch.equal(adapted()(tokens).logits, make_model()(tokens).logits)
    first, same = (adapted().get_submodule("model.layers.0.mlp.up_proj").lora_A.default.weight for _ in range(2))
    other = make_model()
    add_adapter(other, AdapterConfig(rank=4), seed=1)
    assert torch.equal(first, same)
    assert not torch.equal(first, other.get_submodule("model.layers.0.mlp.up_proj").lora_A.default.weight)


def test_frozen_weights_have_no_gradient_to_count():
    lengths, base, model = [5, 3], model_flops(make_model()), adapted()
    flops = model_flops(model)
    learning = sum(one.numel() for one in model.parameters() if one.requires_grad)
    whole = 3 * (base.forward(lengths, 6) + 2 * learning * 8)
    frozen = base.layer_parameters * 8 + base.head_parameters * 6
    assert flops.training(lengths, 6) == whole - 2 * frozen


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_modules": ("q_prok",)}, "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"),
        ({"target_modules": ("lm_head",)}, "adapts lm_head: only linear layers between the embedding and the head"),
        ({"target_modules": ("embed_tokens",)}, r"adapts model\.embed_tokens"),
        ({"modules_to_save": ("lm_heat",)}, "names lm_heat, which Qwen3ForCausalLM does not have; .* lm_head"),
        ({"modules_to_save": ("embed_tokens",)}, "embedding and head of this model are one weight"),
        ({"target_modules": ("q_proj", "v_prok")}, r"names v_prok, which it .* called .*q_proj, up_proj"),
        ({"target_modules": ("layers.7.mlp.up_proj",)}, r"names layers\.7\.mlp\.up_proj, which it does not have"),
        ({"target_modules": ("norm",)}, r"putting an adapter on .*norm.*: Target module .*is not supported"),
        ({"target_modules": r".*\.attn\..*"}, r"matches none of its modules; .*q_proj.*as in model\.layers\.0\."),
        ({"target_modules": "q_proj"}, "the pattern 'q_proj' .*matches none"),
        ({"exclude_modules": ("q_prok",)}, "exclude_modules names q_prok, which it does not have"),
        ({"exclude_modules": tuple(PROJECTIONS)}, "No modules were targeted for adaptation"),
        ({"layers_to_transform": (0, 2)}, "layers_to_transform names 2; its layers are 0 to 1"),
        (
            {"layers_to_transform": (0, 1), "target_modules": ("layers.0.mlp.up_proj",)},
            "names 1, in which target_modules .*matches nothing",
        ),
        ({"rank": 12}, r"rank is 12, more than the width of model\.layers\.0\.self_attn\.k_proj \(8\)"),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_name(fields, message):
    with pytest.raises(ModelError, match=message):
        add_adapter(make_model(tie_word_embeddings=True), AdapterConfig(**{"rank": 4, **fields}), seed=0)


def test_an_adapter_with_numbers_that_are_not_finite_is_not_written(tmp_path):
    model = adapted(target_modules=("q_proj", "v_proj"))
    factors = {name: torch.ones_like(one) for name, one in model.named_parameters() if one.requires_grad}
    write_adapter(tmp_path / "good", factors, model.peft_config["default"].to_dict(), tmp_path, torch.float32)
    assert len(read_adapter(tmp_path / "good").factors) == 4

    broken = next(name for name in factors if ".lora_B." in name)
    factors[broken] = torch.full_like(factors[broken], math.nan)
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_proj\.lora_B.* numbers that are not finite"):
        write_adapter(tmp_path / "bad", factors, model.peft_config["default"].to_dict(), tmp_path, torch.float32)
    assert not (tmp_path / "bad").exists()


def test_what_the_precision_of_the_file_cannot_hold_is_kept_in_fp32_and_named(tmp_path):
    model = adapted(target_modules=("q_proj",))
    factors = {name: torch.full_like(one, 1e5) for name, one in model.named_parameters() if one.requires_grad}
    config = model.peft_config["default"].to_dict()
    assert not write_adapter(tmp_path / "bfloat16", factors, config, tmp_path, torch.bfloat16)
    (problem,) = write_adapter(tmp_path / "float16", factors, config, tmp_path, torch.float16)
    assert "numbers that are too large for float16, so it was written in float32" in str(problem)
    a, b = read_adapter(tmp_path / "float16").factors["model.layers.0.self_attn.q_proj"]
    assert (a == 1e5).all() and (b == 1e5).all()


def test_layers_that_have_learned_nothing_in_the_precision_of_the_file_are_named(tmp_path):
    model = adapted(target_modules=("q_proj",))
    factors = {name: torch.full_like(one, 1e-9) for name, one in model.named_parameters() if one.requires_grad}
    config = model.peft_config["default"].to_dict()
    write_adapter(tmp_path / "bfloat16", factors, config, tmp_path, torch.bfloat16)
    write_adapter(tmp_path / "float16", factors, config, tmp_path, torch.float16)
    assert idle_layers(read_adapter(tmp_path / "bfloat16")) == []
    layers = [f"model.layers.{number}.self_attn.q_proj" for number in (0, 1)]
    assert idle_layers(read_adapter(tmp_path / "float16")) == layers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_adapter_has_an_effect_if_one_element_of_one_weight_changes_in_its_dtype(tmp_path, dtype):
    """An adapter has an effect if one element of one weight changes in its dtype; its other factors are tiny."""
    base = make_model().to(dtype)
    base.save_pretrained(tmp_path / "base")
    model = adapted(target_modules=("q_proj",))
    config = model.peft_config["default"].to_dict()
    factors = {name: torch.full_like(one, 1e-25) for name, one in model.named_parameters() if one.requires_grad}

    def effect(start=None):
        write_adapter(tmp_path / "adapter", factors, config, tmp_path, torch.float32)
        return has_effect(changing(read_adapter(tmp_path / "adapter")), start or {}, tmp_path / "base")

    assert not effect()
    name = "model.layers.1.self_attn.q_proj.lora_{}.default.weight"
    factors[name.format("A")][0, 3], factors[name.format("B")][2, 0] = 1.0, 0.01
    assert effect()
    start = changing(read_adapter(tmp_path / "adapter"))
    assert not effect(start), "it went on from an adapter, and changed nothing"


def test_tensors_that_peft_would_leave_out_or_miss_are_refused(tmp_path):
    make_model(num_hidden_layers=1).save_pretrained(tmp_path / "smaller")
    base = make_model()
    base.save_pretrained(tmp_path / "base")
    lora = add_adapter(base, AdapterConfig(rank=4, modules_to_save=("norm",), use_dora=True), seed=0)
    learned = {name: torch.ones_like(one) for name, one in base.named_parameters() if one.requires_grad}
    write_adapter(tmp_path / "adapter", learned, lora.to_dict(), tmp_path / "base", torch.float32)
    assert loading_problem(tmp_path / "adapter", tmp_path / "base", trust_remote_code=False) is None
    problem = loading_problem(tmp_path / "adapter", tmp_path / "smaller", trust_remote_code=False)
    assert re.search(r"would not load .*layers\.1\.mlp\.down_proj\.lora_A\.weight", str(problem))

    less = {name: one for name, one in learned.items() if "layers.1.mlp.up_proj.lora_B" not in name}
    write_adapter(tmp_path / "adapter", less, lora.to_dict(), tmp_path / "base", torch.float32)
    problem = loading_problem(tmp_path / "adapter", tmp_path / "base", trust_remote_code=False)
    assert re.search(r"layers\.1\.mlp\.up_proj\.lora_B\.weight \(1 in all\), or would miss it", str(problem))

    other = {**lora.to_dict(), "r": 2}
    write_adapter(tmp_path / "adapter", learned, other, tmp_path / "base", torch.float32)
    problem = loading_problem(tmp_path / "adapter", tmp_path / "base", trust_remote_code=False)
    assert re.search("PEFT, with the config beside it, would not load", str(problem))


@pytest.mark.parametrize("saved", ["norm", "mlp", "layers.1.self_attn"])
def test_a_module_that_learned_as_a_whole_is_merged_with_all_that_is_in_it_as_peft_loads_it(saved, tmp_path):
    base, tokens = make_model(), torch.arange(8)[None]
    base.save_pretrained(tmp_path / "base")
    lora = add_adapter(base, AdapterConfig(rank=4, modules_to_save=(saved,)), seed=0)
    learned = {name: one + 0.1 * torch.ones_like(one) for name, one in base.named_parameters() if one.requires_grad}
    write_adapter(tmp_path / "adapter", learned, lora.to_dict(), tmp_path / "base", torch.float32)
    assert loading_problem(tmp_path / "adapter", tmp_path / "base", trust_remote_code=False) is None
    expected = PeftModel.from_pretrained(make_model(), str(tmp_path / "adapter")).eval()(tokens).logits

    adapter, merged = read_adapter(tmp_path / "adapter"), make_model()
    weights = merged.state_dict()
    for name in adapter.weights:
        weights[name].copy_(adapter.merged(name, weights[name]))
    assert (merged(tokens).logits - expected).abs().max() < 1e-5


def test_layers_that_give_something_else_than_numbers_are_refused_by_name():
    sizes = {**SIZES, "num_key_value_heads": 1, "intermediate_size": 24, "intermediate_size_mlp": 24}
    model = AutoModelForCausalLM.from_config(Llama4TextConfig(**sizes, num_local_experts=4))
    with pytest.raises(
        ModelError, match=r"adapts model\.layers\.0\.feed_forward\.router.*Llama4Router.*exclude_modules"
    ):
        add_adapter(model, AdapterConfig(rank=4), seed=0)


def test_transposed_weights_are_changed_transposed(tmp_path):
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2))
    lora = add_adapter(model, AdapterConfig(rank=2, target_modules=("c_fc",)), seed=0)
    factors = {name: torch.ones_like(one) for name, one in model.named_parameters() if one.requires_grad}
    write_adapter(tmp_path / "adapter", factors, lora.to_dict(), tmp_path, torch.float32)
    assert read_adapter(tmp_path / "adapter").change("transformer.h.0.mlp.c_fc").shape == (16, 64)


def test_weights_that_the_files_call_otherwise_are_refused_before_training(tmp_path):
    model = adapted(target_modules=("q_proj",), modules_to_save=("norm",))
    names = changed_weights(model)
    assert "model.layers.1.self_attn.q_proj.weight" in names
    assert "model.norm.weight" in names
    save_file({name: torch.ones(1) for name in names}, tmp_path / "model.safetensors")
    check_mergeable(names, tmp_path)

    save_file({f"language_{name}": torch.ones(1) for name in names}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"of its weights have other names .*model\.layers\.0\.input_layernorm"):
        check_mergeable(names, tmp_path)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_what_an_initialization_takes_out_of_the_base_is_in_its_factors(init):
    tokens, model = torch.arange(8)[None], adapted(init=init)
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert not torch.equal(layer.base_layer.weight, make_model().get_submodule("model.layers.0.mlp.up_proj").weight)
    assert (model(tokens).logits - make_model()(tokens).logits).abs().max().item() < 1e-5


def test_processes_without_weights_do_not_decompose_them():
    model = make_model()
    for parameter in model.parameters():
        parameter.data.fill_(math.nan)  # what memory holds that was never written
    add_adapter(model, AdapterConfig(rank=4, init="pissa"), seed=0, has_weights=False)
    factors = factors_of(model)
    assert all(one.isfinite().all() for one in factors.values())


def test_an_adapter_that_went_back_to_its_start_has_no_effect(tmp_path):
    make_model().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    model = adapted(target_modules=("q_proj",), init="pissa")
    start = factors_of(model)
    config = model.peft_config["default"].to_dict()
    write_adapter(tmp_path / "adapter", start, config, tmp_path, torch.float32, start)
    assert not has_effect(changing(read_adapter(tmp_path / "adapter")), {}, tmp_path / "base")


def test_little_that_was_learned_from_large_factors_survives_rounding(tmp_path):
    model = adapted(target_modules=("q_proj",), init="pissa")
    start = factors_of(model)
    learned = {name: weight + 1e-3 * torch.randn_like(weight) for name, weight in start.items()}
    config = model.peft_config["default"].to_dict()
    write_adapter(tmp_path / "adapter", learned, config, tmp_path, torch.bfloat16, start)
    found = read_adapter(tmp_path / "adapter")
    for layer in found.factors:
        a, b = f"{layer}.lora_A.default.weight", f"{layer}.lora_B.default.weight"
        expected = 32 / 4 * (learned[b] @ learned[a] - start[b] @ start[a])
        assert (found.change(layer) - expected).norm() < 2**-6 * expected.norm()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "greater than 0"),
        ({"target_modules": []}, "found nothing that could learn"),
        ({"target_modules": ""}, "found nothing that could learn"),
        ({"target_modules": "(q|k"}, "is no regular expression: missing"),
        ({"layers_to_transform": []}, "at least 1 item"),
        ({"init": "eva", "stack": "merge"}, "`init: eva` does not go with `stack: merge`"),
        ({"eva_rho": 0.5}, "greater than or equal to 1"),
        ({"init": "gaussian"}, "Input should be 'default', 'pissa'"),
        ({"init": "pissa", "use_dora": True}, "`use_dora` does not go with `init: pissa`"),
        ({"base_precision": "nf4", "use_dora": True}, "`use_dora` does not go with `base_precision: nf4`"),
        ({"base_precision": "fp8"}, "'bf16', 'fp32', 'nf4' or 'int8'"),
        ({"loraplus_lr_ratio": 0}, "greater than 0"),
        ({"bias": "all"}, "Extra inputs"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused_when_read(fields, message):
    with pytest.raises(ValidationError, match=message):
        AdapterConfig.model_validate(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"exclude_modules": ["k_proj"]},
        {"layers_to_transform": [0, 2]},
        {"modules_to_save": ["norm"]},
    ],
)
def test_a_recipe_may_list_what_learns(fields):
    tree = {
        "base": {"kind": "download", "model": "builtin/qwen3-1m"},
        "rows": {"kind": "download", "dataset": "builtin/addition"},
        "tuned": {
            "kind": "train",
            "method": "sft",
            "model": "base",
            "adapter": fields,
            "data": {"dataset": "rows"},
            "global_batch_size": 8,
            "learning_rate": 1e-3,
        },
    }
    ((name, listed),) = fields.items()
    tuned = load_stages("small", Path("/"), tree).stages["tuned"]
    assert getattr(tuned.adapter, name) == tuple(listed)


LORA = LoraConfig(init_lora_weights=False)
IDS = torch.arange(24).view(2, 12) % 7


def adapted_with_biases(base_precision=None, **fields):
    """Return a model with biases in its projections, under an adapter that changes its logits."""
    model = make_model(hidden_size=64, intermediate_size=64, head_dim=32, attention_bias=True)
    add_adapter(model, AdapterConfig(rank=4, alpha=10, **fields), seed=0)
    for module in adapted_layers(model).values():
        torch.nn.init.normal_(module.lora_B["default"].weight, std=0.1)
    store_base(model, base_precision, torch.float32)
    return model


def results(model, dtype):
    """Return a model's logits and the gradients of all that learns, in fp64."""
    model = model.to(dtype).train()
    logits = model(IDS).logits
    (logits * torch.linspace(-1, 1, logits.numel(), dtype=dtype).view_as(logits)).sum().backward()
    gradients = [one.grad for one in model.parameters() if one.requires_grad]
    return [one.detach().double() for one in (logits, *gradients)]


def relative_error(found, expected):
    return max(((one - other).norm() / other.norm()).item() for one, other in zip(found, expected, strict=True))


def classes(model):
    return {type(module) for module in adapted_layers(model).values()}


@pytest.mark.parametrize("base_precision", [None, "nf4", "int8"])
def test_outputs_and_gradients_are_those_of_peft(base_precision):
    ours = adapted_with_biases(base_precision)
    of_peft = copy.deepcopy(ours)
    fuse_products(ours)
    assert (classes(ours), classes(of_peft)) == ({FusedLoraLinear}, {LoraLinear})
    assert relative_error(results(ours, torch.float64), results(of_peft, torch.float64)) < 1e-12


def test_a_layer_in_bf16_rounds_less_than_that_of_peft():
    torch.manual_seed(0)
    of_peft = LoraLinear(torch.nn.Linear(256, 512).requires_grad_(False), "default", LORA, r=8, lora_alpha=80)
    of_peft.bfloat16()
    states, weights = torch.randn(4000, 256).bfloat16(), torch.randn(4000, 512).bfloat16()
    found = []
    for dtype, fuses in ((torch.float64, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        layer = torch.nn.Sequential(copy.deepcopy(of_peft).to(dtype))
        if fuses:
            fuse_products(layer)
        inputs = states.to(dtype).requires_grad_()
        output = layer(inputs)
        (gradient,) = torch.autograd.grad((output * weights.to(dtype)).sum(), inputs)
        found.append([output.detach().double(), gradient.double()])
    exact, peft, ours = found
    for number in range(2):
        assert relative_error(ours[number : number + 1], exact[number : number + 1]) < 0.95 * relative_error(
            peft[number : number + 1], exact[number : number + 1]
        )


def test_a_disabled_adapter_of_fused_products_gives_the_base():
    model = adapted_with_biases()
    fuse_products(model)
    logits = model(IDS).logits
    for module in adapted_layers(model).values():
        module.enable_adapters(False)
    assert not torch.allclose(model(IDS).logits, logits)
    for module in adapted_layers(model).values():
        module.enable_adapters(True)
    assert torch.equal(model(IDS).logits, logits)


def test_dropout_is_that_of_peft():
    ours = adapted_with_biases(dropout=0.5)
    of_peft = copy.deepcopy(ours)
    fuse_products(ours)
    found = []
    for model in (ours, of_peft):
        torch.manual_seed(1)
        found.append(model.train()(IDS).logits)
    assert torch.equal(*found)


@pytest.mark.parametrize("fields", [{"use_dora": True}, {"target_modules": ("q_proj",), "modules_to_save": ("norm",)}])
def test_only_plain_layers_are_fused(fields):
    model = adapted_with_biases(**fields)
    fuse_products(model)
    assert classes(model) == ({LoraLinear} if "use_dora" in fields else {FusedLoraLinear})
