"""`init: eva` starts adapters from the directions that PEFT's `initialize_lora_eva_weights` finds on the same rows."""

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3Config, Qwen3MoeConfig

from stages.adapters.config import AdapterConfig
from stages.adapters.files import read_adapter, write_adapter
from stages.adapters.lora import ADAPTER_NAME, adapted_layers, add_adapter, load_trained_adapter, store_base
from stages.adapters.quantized import Int8Linear, Nf4Linear, QuantizedLinear
from stages.core.errors import ModelError
from stages.data.batch import IGNORED, Batch, Documents
from stages.engines.fsdp.eva import InputRows, start_directions
from stages.engines.fsdp.model import load_model
from tests.zoo.models import tiny_config

ROWS, LENGTH = 4, 24
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
CONFIGS = {
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, intermediate_size=48, initializer_range=0.3),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3),
    "qwen3_5": tiny_config("qwen3_5_text", initializer_range=0.3),
}
WIDE_SIZES = {**SIZES, "hidden_size": 64, "head_dim": 16}
WIDE = Qwen3Config(**WIDE_SIZES, num_key_value_heads=2, intermediate_size=64, initializer_range=0.3)
"""Config of a model whose weight rows have 64 elements, the length of an NF4 block."""
EXPERTS = Qwen3MoeConfig(**SIZES, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)


@pytest.fixture(autouse=True)
def _alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def save(config, folder):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows():
    """Provide batches of rows with one document each: token ids, and a mask of answer tokens."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 64, (ROWS, LENGTH), generator=generator), torch.rand(ROWS, LENGTH, generator=generator) > 0.3)
        for _ in range(3)
    ]


def as_batch(tokens, is_learned):
    targets = torch.full_like(tokens, IGNORED)
    targets[:, :-1] = torch.where(is_learned[:, 1:], tokens[:, 1:], IGNORED)
    positions = torch.arange(LENGTH).expand(ROWS, -1).contiguous()
    documents = torch.arange(ROWS)[:, None].expand(-1, LENGTH).contiguous()
    return Batch.of(tokens, targets, positions, Documents(documents, ROWS, [LENGTH] * ROWS))


def ours(folder, file, rows, **fields):
    config = AdapterConfig(rank=4, alpha=8, init="eva", **fields)
    model = load_model(folder, reads_weights=True, trust_remote_code=False)
    given = InputRows([as_batch(*one) for one in rows], file)
    directions = start_directions(model, config, given, folder, False)
    lora = add_adapter(model.causal_lm, config, seed=0, directions=directions)
    return model.causal_lm, lora, given


def pefts(folder, rows, targets, **fields):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    eva = peft.EvaConfig(rho=fields.pop("eva_rho", 2.0))
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights="eva", eva_config=eva, **fields)
    model = peft.get_peft_model(model, lora)
    labels = [torch.where(is_learned, tokens, IGNORED) for tokens, is_learned in rows]
    for one in labels:
        one[:, 0] = IGNORED  # which is no target of any token
    inputs = [{"input_ids": tokens, "labels": label} for (tokens, _), label in zip(rows, labels, strict=True)]
    peft.tuners.lora.eva.initialize_lora_eva_weights(model, inputs, show_progress_bar=False)
    return model


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("qwen3", {}),
        ("qwen3", {"eva_rho": 1.0, "use_dora": True}),
        ("qwen3", {"eva_rho": 3.0, "use_rslora": True}),
        ("gpt2", {"target_modules": ("c_attn", "c_fc")}),
        ("qwen3_5", {"target_modules": ("in_proj_qkv", "out_proj", "gate_proj")}),
    ],
)
def test_ranks_directions_and_scalings_are_pefts(name, fields, rows, tmp_path):
    folder = save(CONFIGS[name], tmp_path / "base" / "model")
    model, lora, given = ours(folder, tmp_path / "eva.safetensors", rows, **fields)
    targets = list(fields.get("target_modules", ())) or "all-linear"
    plain = {key: value for key, value in fields.items() if key != "target_modules"}
    if name == "gpt2":
        plain["fan_in_fan_out"] = True
    expected = adapted_layers(pefts(folder, rows, targets, **plain).base_model.model)
    found = adapted_layers(model)
    assert found.keys() == expected.keys()
    for layer, one in expected.items():
        a = one.lora_A[ADAPTER_NAME].weight
        assert found[layer].lora_A[ADAPTER_NAME].weight.shape == a.shape, layer
        assert (found[layer].lora_A[ADAPTER_NAME].weight - a).abs().max() < 1e-4, layer
        assert found[layer].scaling[ADAPTER_NAME] == pytest.approx(one.scaling[ADAPTER_NAME])
        assert not found[layer].lora_B[ADAPTER_NAME].weight.any()
    ranks = {one.lora_A[ADAPTER_NAME].weight.shape[0] for one in found.values()}
    assert (ranks == {4}) == (fields.get("eva_rho") == 1.0)
    assert f"has at most {max(ranks)}" in given.described()
    assert lora.init_lora_weights is True


def learned(model):
    """Return an adapter's trainable LoRA factors, with B set to random values as after training."""
    torch.manual_seed(1)
    for name, one in model.named_parameters():
        if ".lora_B." in name:
            one.data.normal_()
    return {name: one.detach() for name, one in model.named_parameters() if one.requires_grad}


@pytest.mark.parametrize("fields", [{}, {"use_rslora": True, "eva_rho": 3.0}])
def test_what_is_written_is_loaded_by_peft_merged_and_gone_on_with(fields, rows, tmp_path):
    folder = save(CONFIGS["qwen3"], tmp_path / "base" / "model")
    model, lora, _ = ours(folder, tmp_path / "eva.safetensors", rows, **fields)
    parameters = learned(model)
    write_adapter(tmp_path / "adapter", parameters, lora.to_dict(), folder, torch.float32)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    before = load_file(folder / "model.safetensors")
    adapter = read_adapter(tmp_path / "adapter")
    assert adapter.has_own_ranks
    for name in adapter.weights:
        assert (adapter.merged(name, before[name]) - merged[name]).abs().max() < 1e-5
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    directions = {layer: a for layer, (a, _) in adapter.factors.items()}
    add_adapter(again, AdapterConfig(rank=4, alpha=8, **fields), seed=0, directions=directions)
    load_trained_adapter(again, adapter)
    found = dict(again.named_parameters())
    assert all(torch.equal(found[name], one) for name, one in parameters.items())


@pytest.mark.parametrize(("precision", "kind"), [("nf4", Nf4Linear), ("int8", Int8Linear)])
def test_beside_a_base_in_few_bits_it_starts_from_the_exact_one(precision, kind, rows, tmp_path):
    """EVA's directions are those of the exact base, even if it is then quantized, here in all layers."""
    folder, fields = save(WIDE, tmp_path / "base" / "model"), {"exclude_modules": ("v_proj",)}
    exact, _, _ = ours(folder, tmp_path / "exact.safetensors", rows, **fields)
    model, lora, _ = ours(folder, tmp_path / "eva.safetensors", rows, base_precision=precision, **fields)
    store_base(model, precision, torch.float32)
    found = adapted_layers(model)
    for name, layer in adapted_layers(exact).items():
        assert torch.equal(found[name].lora_A[ADAPTER_NAME].weight, layer.lora_A[ADAPTER_NAME].weight)
        assert isinstance(found[name].get_base_layer(), kind)
    num_rounded = sum(isinstance(one, QuantizedLinear) for one in model.modules())
    assert num_rounded == 7 * WIDE.num_hidden_layers > len(found)

    write_adapter(tmp_path / "adapter", learned(model), lora.to_dict(), folder, torch.float32)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for layer in base.model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = kind(layer).weight
    model.set_attn_implementation("eager")
    expected = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        assert (model.eval()(rows[0][0]).logits - expected(rows[0][0]).logits).abs().max() < 1e-4


def test_an_attempt_that_goes_on_has_the_directions_of_the_first(rows, tmp_path):
    folder, file = save(CONFIGS["qwen3"], tmp_path / "base" / "model"), tmp_path / "scratch" / "eva.safetensors"
    first, _, _ = ours(folder, file, rows)
    again, _, _ = ours(folder, file, rows[:1])
    name = "model.layers.0.mlp.up_proj"
    a, b = (one.get_submodule(name).lora_A[ADAPTER_NAME].weight for one in (first, again))
    assert torch.equal(a, b)


def test_what_it_cannot_do_is_named(rows, tmp_path):
    folder = save(EXPERTS, tmp_path / "base" / "model")
    with pytest.raises(ModelError, match="PEFT has no `init: eva`"):
        ours(folder, tmp_path / "eva.safetensors", rows)
    folder = save(CONFIGS["qwen3"], tmp_path / "dense" / "model")
    with pytest.raises(ModelError, match=r"rank is 4 × eva_rho 9, more than the width of"):
        ours(folder, tmp_path / "eva.safetensors", rows, eva_rho=9.0)
