"""Merging one or several adapters gives PEFT's result in every combination; unusable adapters are refused."""

import json
import shutil
import subprocess
import sys

import peft
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MambaConfig, Qwen3MoeConfig

from stages.adapters.config import AdapterConfig
from stages.adapters.files import write_adapter
from stages.adapters.lora import add_adapter
from stages.core.contract import StageContext
from stages.core.errors import GateError, ModelError
from stages.kinds.merge.config import MergeConfig
from stages.kinds.merge.run import run
from tests.findings import raise_findings
from tests.mergeable import BASE, make_adapter, make_base, note_base, write_record

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
CONSTANT_BYTES = 2**27
"""Bytes of memory allowed besides weights, for modules imported late, logits, and copies of one weight."""
MIXTURES = [
    {},
    {"weights": [0.7, -0.2]},
    {"combination": "ties", "density": 0.5},
    {"combination": "dare_linear", "density": 0.5, "weights": [0.5, 0.25]},
    {"combination": "dare_ties", "density": 0.3, "seed": 5, "weights": [1.0, 2.0]},
]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """Provide a base and two adapters, the second on fewer layers, with predictions on three documents."""
    folder = tmp_path_factory.mktemp("artifacts")
    artifacts = {"base": folder / BASE, "one": folder / "one-1", "two": folder / "two-2"}
    make_base(artifacts["base"], **SIZES)
    for number, (name, modules) in enumerate({"one": "all-linear", "two": ["q_proj", "up_proj"]}.items()):
        adapted = make_adapter(artifacts["base"], number, modules)
        adapted.save_pretrained(artifacts[name] / "adapter")
        note_base(artifacts[name])
        write_record(artifacts[name], adapted)
    return artifacts


def merge(inputs, work, **fields):
    work.mkdir()
    config = MergeConfig.model_validate({"kind": "merge", "model": "base", **fields})
    context = StageContext(work, "merged", "0" * 12, inputs, {}, work)
    result = run(config, context)
    raise_findings(context)
    return result


def seed_before_first(monkeypatch, seed):
    """Seed torch when PEFT begins DARE, after its adapter's weights are drawn, to drop what our merge drops."""
    name = "_generalized_task_arithmetic_weighted_adapter"
    real, seeded = getattr(peft.LoraModel, name), []

    def call(*arguments, **options):
        if not seeded:
            seeded.append(torch.manual_seed(seed))
        return real(*arguments, **options)

    monkeypatch.setattr(peft.LoraModel, name, call)


def weights_of(model):
    return {name: one for name, one in model.state_dict().items() if "lora" not in name}


@pytest.mark.parametrize("fields", MIXTURES)
def test_a_mixture_is_that_of_peft(artifacts, tmp_path, monkeypatch, fields):
    result = merge(artifacts, tmp_path / "work", adapters=["one", "two"], max_difference=1e-5, **fields)
    assert result.metrics["max_abs_logprob_difference"] < 1e-5
    assert result.metrics["kl_nats_per_token"] < 1e-6
    assert result.metrics["same_choice_fraction"] == 1

    base = AutoModelForCausalLM.from_pretrained(artifacts["base"] / "model", dtype=torch.float32)
    oracle = peft.PeftModel.from_pretrained(base, artifacts["one"] / "adapter", adapter_name="one")
    oracle.load_adapter(artifacts["two"] / "adapter", adapter_name="two")
    seed_before_first(monkeypatch, fields.get("seed", 0))
    options = {"combination_type": fields.get("combination", "linear"), "density": fields.get("density")}
    oracle.add_weighted_adapter(["one", "two"], fields.get("weights", [1.0, 1.0]), "mixture", **options)
    oracle.set_adapter("mixture")
    expected = weights_of(oracle.merge_and_unload())
    found = weights_of(AutoModelForCausalLM.from_pretrained(tmp_path / "work" / "model", dtype=torch.float32))
    assert max((found[name] - weight).abs().max().item() for name, weight in expected.items()) < 1e-6


def test_one_adapter_gives_what_was_recorded_and_keeps_the_record(artifacts, tmp_path):
    result = merge(artifacts, tmp_path / "work", adapter="one", max_difference=1e-5)
    assert result.metrics["max_abs_logprob_difference"] < 1e-5
    record = (tmp_path / "work" / "log_probabilities.json").read_text()
    assert record == (artifacts["one"] / "log_probabilities.json").read_text()
    assert not (tmp_path / "work" / "scratch").exists()


def test_layers_of_other_architectures_are_merged_as_peft_does(artifacts, tmp_path):
    base, trained = shutil.copytree(artifacts["base"], tmp_path / BASE), tmp_path / "tuned-1"
    torch.manual_seed(0)
    vocabulary = json.loads((base / "model" / "config.json").read_text())["vocab_size"]
    config = MambaConfig(vocab_size=vocabulary, hidden_size=32, state_size=8, num_hidden_layers=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(base / "model")
    adapted = make_adapter(base, 1, ["in_proj", "x_proj"])
    adapted.save_pretrained(trained / "adapter")
    note_base(trained)
    write_record(trained, adapted)

    result = merge({"base": base, "one": trained}, tmp_path / "work", adapter="one", max_difference=1e-5)
    assert result.metrics["merged_layers"] == 4
    expected = adapted.merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "work" / "model", dtype=torch.float32).state_dict()
    assert max((found[name] - weight).abs().max().item() for name, weight in expected.items()) < 1e-6


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Provide a mixture-of-experts model, and an adapter on its attention, experts and routers."""
    folder = tmp_path_factory.mktemp("mixture")
    artifacts = {"base": folder / BASE, "one": folder / "one-1"}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    make_base(artifacts["base"], architecture=Qwen3MoeConfig, **SIZES, **experts)
    base = artifacts["base"] / "model"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = add_adapter(model, AdapterConfig(rank=3), seed=0)
    learning = {name: one.detach().normal_(std=0.2) for name, one in model.named_parameters() if one.requires_grad}
    write_adapter(artifacts["one"] / "adapter", learning, lora.to_dict(), base, torch.float32)
    write_record(artifacts["one"], model.eval())
    return artifacts


def test_experts_are_merged_as_the_files_have_them(mixture, tmp_path):
    result = merge(mixture, tmp_path / "work", adapter="one", max_difference=1e-5)
    assert result.metrics["max_abs_logprob_difference"] < 1e-5
    assert result.metrics["changed_fraction"] > 0.9
    found, before = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "work" / "model", mixture["base"] / "model")
    )
    assert found.keys() == before.keys()
    changed = [name for name, one in found.items() if not torch.equal(one, before[name])]
    assert len([name for name in changed if ".experts." in name]) == SIZES["num_hidden_layers"] * 4 * 3
    assert len([name for name in changed if ".mlp.gate." in name]) == SIZES["num_hidden_layers"]


def test_an_adapter_of_experts_is_not_mixed_with_others(mixture, tmp_path):
    with pytest.raises(ModelError, match=r"one has .* or adapters of experts, which are not combined here"):
        merge(mixture, tmp_path / "work", adapters=["one"], weights=[0.5])


def test_experts_of_another_model_are_refused(artifacts, mixture, tmp_path):
    with pytest.raises(ModelError, match=r"of model\.layers\.0\.mlp\.experts\.down_proj.* does not have"):
        merge({**mixture, "base": artifacts["base"]}, tmp_path / "work", adapter="one")


def test_in_bf16_the_rounding_is_measured(artifacts, tmp_path):
    half = shutil.copytree(artifacts["base"], tmp_path / BASE)
    file = half / "model" / "model.safetensors"
    save_file({name: one.bfloat16() for name, one in load_file(file).items()}, file, metadata={"format": "pt"})
    config = half / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))
    result = merge({**artifacts, "base": half}, tmp_path / "work", adapter="one")
    assert 1e-5 < result.metrics["max_abs_logprob_difference"] < 0.05
    assert 1e-9 < result.metrics["kl_nats_per_token"] < 1e-3
    with pytest.raises(GateError, match="more than max_difference"):
        merge({**artifacts, "base": half}, tmp_path / "again", adapter="one", max_difference=1e-6)
    kept, good = (tmp_path / name / "model" / "model.safetensors" for name in ("again", "work"))
    assert kept.read_bytes() == good.read_bytes(), "what was merged is kept, and refused"


def test_a_layer_that_rounding_takes_away_is_warned_of_and_an_adapter_that_it_takes_away_is_refused(
    artifacts, tmp_path
):
    half = shutil.copytree(artifacts["base"], tmp_path / BASE)
    file = half / "model" / "model.safetensors"
    save_file({name: one.bfloat16() for name, one in load_file(file).items()}, file, metadata={"format": "pt"})
    small = shutil.copytree(artifacts["one"], tmp_path / "one-1")
    factors = small / "adapter" / "adapter_model.safetensors"
    tensors = load_file(factors)
    lost = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    save_file({**tensors, lost: 1e-9 * tensors[lost]}, factors)
    merge({**artifacts, "base": half, "one": small}, tmp_path / "work", adapter="one")
    events = (tmp_path / "work" / "events.jsonl").read_text()
    assert "1 of 14 adapted weights are as they were after rounding (model.layers.1.self_attn.v_proj.weight)" in events

    save_file({name: 1e-9 * one if "lora_B" in name else one for name, one in tensors.items()}, factors)
    with pytest.raises(ModelError, match="14 of 14 adapted weights are as they were after rounding"):
        merge({**artifacts, "base": half, "one": small}, tmp_path / "again", adapter="one", max_difference=1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "name what to merge as `adapter`, or as `adapters`"),
        ({"adapter": "one", "adapters": ["two"]}, "expected one of the two"),
        ({"adapters": ["one", "two", "one"]}, "names one twice"),
        ({"adapters": ["one", "two"], "weights": [1.0]}, "1 numbers for 2 `adapters`"),
        ({"adapter": "one", "weights": [1.0]}, "1 numbers for 0 `adapters`"),
        ({"adapters": ["one", "two"], "weights": [0.5, -0.5]}, r"sum to 0: the adapters would cancel"),
        ({"adapters": ["one", "two"], "weights": [0.5, 0.0]}, "finite numbers but 0"),
        ({"adapters": ["one", "two"], "weights": [0.5, float("nan")]}, "finite numbers but 0"),
        ({"adapters": ["one", "two"], "combination": "ties"}, "ties` needs `density`"),
        ({"adapters": ["one", "two"], "density": 0.5}, "linear` has no use for `density`"),
        ({"adapter": "one", "combination": "ties", "density": 0.5}, "combines several `adapters`"),
        ({"adapters": ["one", "two"], "combination": "ties", "density": 0.5, "seed": 1}, "`seed` is of dare"),
        ({"adapters": ["one", "two"], "combination": "ties", "density": 0.0}, "greater than 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields, said):
    with pytest.raises(ValidationError, match=said):
        MergeConfig.model_validate({"kind": "merge", "model": "base", **fields})


def of_another_rank(artifact, base):
    make_adapter(base, 3, ["q_proj"], r=2).save_pretrained(artifact / "adapter")
    note_base(artifact)


def with_dora(artifact, base):
    make_adapter(base, 3, ["q_proj"], use_dora=True).save_pretrained(artifact / "adapter")
    note_base(artifact)


def of_another_base(artifact, base):
    file = artifact / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "sft-other"}))


def cut_off(artifact, base):
    file = artifact / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def without_config(artifact, base):
    (artifact / "adapter" / "adapter_config.json").unlink()


def with_other_keys(artifact, base):
    file = artifact / "adapter" / "adapter_model.safetensors"
    save_file({name.replace("lora_B", "lora_X"): one for name, one in load_file(file).items()}, file)


def of_other_layers(artifact, base):
    file = artifact / "adapter" / "adapter_model.safetensors"
    save_file({name.replace("q_proj", "query"): one for name, one in load_file(file).items()}, file)


def of_other_sizes(artifact, base):
    file = artifact / "adapter" / "adapter_model.safetensors"
    save_file({name: torch.cat([one, one], dim=int("lora_A" in name)) for name, one in load_file(file).items()}, file)


def of_a_convolution(artifact, base):
    """Damage an adapter: the LoRA factors of `q_proj` get the extra dimension of a convolution's factors."""
    file = artifact / "adapter" / "adapter_model.safetensors"
    save_file({name: one[..., None] if "q_proj" in name else one for name, one in load_file(file).items()}, file)


def without_record(artifact, base):
    (artifact / "log_probabilities.json").unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (of_another_base, r"merging two-2 into base-0123456789ab: it was trained on sft-other"),
        (cut_off, r"reading the adapter in .*two-2/adapter: .*train it again"),
        (without_config, r"reading the adapter in .*two-2/adapter: .*adapter_config.json.*train it again"),
        (with_other_keys, r"lora_X.* unexpected or without a partner"),
        (of_other_layers, r"the adapter is of .*query, which Qwen3ForCausalLM does not have"),
        (of_other_sizes, r"they do not belong together"),
        (
            of_a_convolution,
            r"layers.0.self_attn.q_proj.lora_A.weight.* expected a matrix for each factor",
        ),
        (without_record, r"log_probabilities.json: .*train the stage again"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(artifacts, tmp_path, damage, said):
    damaged = shutil.copytree(artifacts["two"], tmp_path / "two-2")
    damage(damaged, artifacts["base"])
    with pytest.raises(ModelError, match=said):
        merge({**artifacts, "two": damaged}, tmp_path / "work", adapter="two")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (of_another_rank, "expected the same rank, but one has 4, two has 2"),
        (with_dora, "two has DoRA or whole modules"),
    ],
)
def test_adapters_that_do_not_mix_are_refused(artifacts, tmp_path, damage, said):
    other = shutil.copytree(artifacts["two"], tmp_path / "two-2")
    damage(other, artifacts["base"])
    with pytest.raises(ModelError, match=said):
        merge({**artifacts, "two": other}, tmp_path / "work", adapters=["one", "two"])


def test_no_model_is_ever_in_memory_as_a_whole(tmp_path):
    """Merging a model of 320 MiB in shards of 16 MiB never holds it whole, beyond the memory before the merge."""
    artifacts, work = tmp_path / "artifacts", tmp_path / "work"
    work.mkdir()
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8}
    make_base(artifacts / BASE, **wide, num_hidden_layers=5, head_dim=128)
    adapted = make_adapter(artifacts / BASE, 1, "all-linear")
    adapted.save_pretrained(artifacts / "tuned-1" / "adapter")
    note_base(artifacts / "tuned-1")
    write_record(artifacts / "tuned-1", adapted)
    sizes = [file.stat().st_size for file in (artifacts / BASE / "model").glob("*.safetensors")]
    layer = sum(one.nbytes for one in adapted.get_base_model().model.layers[0].parameters())
    del adapted
    command = [sys.executable, "-m", "tests.merge_peak", artifacts, work]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    peak = int(done.stdout.splitlines()[-1])
    assert peak < max(sizes) + layer + CONSTANT_BYTES < 0.7 * sum(sizes)
