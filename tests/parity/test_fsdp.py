"""Training with FSDP2 under every layout equals plain Transformers on the same documents, one by one, in fp32."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.parity.plain_adam import trainer_parameter_groups
from tests.zoo.models import tiny_model

VOCABULARY = 64
NUM_STEPS, NUM_ROWS, ROW_LENGTHS = 3, 4, [(9, 5, 10), (24,), (3, 2, 19), (12, 12)]
LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY = 1e-2, 0.5, 0.1
EPSILON = 1e-3
"""Adam's epsilon in comparisons; see `megatron_cases.py`."""

LAYOUTS = {
    1: {
        "plain": {},
        "accumulated": {"micro_batch_size": 1},
        "full-recompute": {"recompute": "full"},
        "selective-recompute": {"recompute": "selective"},
        "offloaded": {"cpu_offload": True},
        "activations-offloaded": {"recompute": "offload"},
        "compiled": {"compile": True},
    },
    2: {
        "sharded": {"dp_shard": 2},
        "accumulated": {"dp_shard": 2, "micro_batch_size": 1},
        "accumulated-sharded": {"dp_shard": 2, "micro_batch_size": 1, "accumulate": "sharded"},
        "replicated-sharded": {"dp_replicate": 2, "micro_batch_size": 1, "accumulate": "sharded"},
        "replicated": {"dp_replicate": 2},
        "kept": {"dp_shard": 2, "reshard_after_forward": False},
        "no-prefetch": {"dp_shard": 2, "prefetch_layers": 0},
        "deep-prefetch": {"dp_shard": 2, "prefetch_layers": 3},
        "full-recompute": {"dp_shard": 2, "recompute": "full"},
        "selective-recompute": {"dp_shard": 2, "recompute": "selective", "micro_batch_size": 1},
        "offloaded": {"dp_shard": 2, "cpu_offload": True},
        "activations-offloaded": {"dp_shard": 2, "recompute": "offload"},
        "split": {"tp": 2},
        "split-tokens": {"tp": 2, "sequence_parallel": True},
        "split-tokens-recomputed": {"tp": 2, "sequence_parallel": True, "micro_batch_size": 1, "recompute": "full"},
        "sliced": {"cp": 2, "micro_batch_size": 1, "recompute": "full"},
        "split-accumulated": {"tp": 2, "micro_batch_size": 1, "recompute": "full"},
        "split-offloaded": {"tp": 2, "cpu_offload": True},
        "sliced-offloaded": {"cp": 2, "cpu_offload": True},
    },
    4: {
        "sharded": {"dp_shard": 4, "micro_batch_size": 1},
        "hybrid": {"dp_replicate": 2, "dp_shard": 2, "micro_batch_size": 1},
        "split-sharded": {"dp_shard": 2, "tp": 2, "micro_batch_size": 1},
        "split-sliced": {"cp": 2, "tp": 2},
        "split-sharded-tokens": {"dp_shard": 2, "tp": 2, "sequence_parallel": True, "micro_batch_size": 1},
    },
}
SPREAD = {"dp_shard": 2, "ep": 2, "micro_batch_size": 1, "recompute": "full"}
"""Layout that spreads experts, of models that have some."""
RESHARDED = (("split", "sharded"), ("sharded", "sliced"), ("sliced", "split"))
"""Names of layouts of two processes that write a checkpoint, and of those that go on from it."""
ACCUMULATED = ("accumulated", "accumulated-sharded")
"""Names of the two layouts that accumulate gradients over micro-batches, in unsharded and in sharded form."""
MODELS = ("qwen3", "untied", "moe", "gpt2", "stateful", "balanced", "frozen")
MOE = {"balanced": {"aux_loss_coefficient": 0.3}, "frozen": {"freeze_router": True}}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Provide tiny models: tied and untied heads, experts, learned positions and biases, states beside attention."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    gpt2 = {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    made = {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes, intermediate_size=40, tie_word_embeddings=True)),
        "untied": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes, intermediate_size=40, tie_word_embeddings=False)),
        "moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, tie_word_embeddings=False)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**gpt2, **dropout)),
        # Times 4 by `tiny_model`. From 0.02 on, the states' gradients grow: fp32 is up to 1e-4 from fp64 in their norm.
        "stateful": lambda: tiny_model("qwen3_5_text", initializer_range=0.016),
    }
    made["balanced"] = made["frozen"] = made["moe"]
    for name in MODELS:
        torch.manual_seed(0)
        made[name]().save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def data():
    return make_data(NUM_STEPS)


def make_data(num_steps):
    """Return random token ids for each step's global batch, by row and document."""
    generator = torch.Generator().manual_seed(1)
    return [
        [
            [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
            for lengths in ROW_LENGTHS
        ]
        for _ in range(num_steps)
    ]


@pytest.fixture(scope="module")
def plain(models, data):
    """Provide results of plain Transformers training for each model: losses, gradient norms, the trained model."""
    return {name: train_plainly(models / name, data) for name in MODELS}


def train_plainly(folder, data):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    moe = MOE.get(folder.name, {})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (moe.get("freeze_router") and name.endswith(".gate.weight")))
    return learn_plainly(model, trainer_parameter_groups(model, WEIGHT_DECAY), data, moe.get("aux_loss_coefficient", 0))


def learn_plainly(model, parameter_groups, data, aux_loss_coefficient=0.0):
    optimizer = torch.optim.AdamW(parameter_groups, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=EPSILON)
    losses, grad_norms, model.aux_losses = [], [], []
    for rows in data:
        documents = [torch.tensor([document]) for row in rows for document in row]
        count = sum(document.shape[1] - 1 for document in documents)
        # Added up in fp64: the sum of the documents would round more than what it is compared with.
        loss = sum(negative_log_likelihood(model, document).double() for document in documents) / count
        losses.append(loss.item())
        if aux_loss_coefficient:
            model.aux_losses.append(aux_loss := mean_aux_loss(model, rows))
            loss = loss + aux_loss_coefficient * aux_loss
        loss.backward()
        grad_norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM).item())
        if len(losses) == 1:
            named = model.named_parameters()
            model.first_gradients = {name: one.grad.clone() for name, one in named if one.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return losses, grad_norms, model.eval()


def mean_aux_loss(model, rows):
    """Return Transformers' load-balancing loss, averaged over layers and over rows of equal length."""
    found = []
    for row in rows:
        outputs = [model(input_ids=torch.tensor([document]), output_router_logits=True) for document in row]
        for layer in zip(*(output.router_logits for output in outputs), strict=True):
            found.append(load_balancing_loss_func((torch.cat(layer),), model.num_experts, model.num_experts_per_tok))
    return torch.stack(found).mean()


def negative_log_likelihood(model, document):
    logits = model(input_ids=document).logits[0, :-1].float()
    return functional.cross_entropy(logits, document[0, 1:], reduction="sum")


def make_config(layout):
    return {
        "kind": "train",
        "method": "sft",
        "model": "base",
        "data": {"dataset": "data"},
        "layout": {
            "micro_batch_size": 2 if layout.get("dp_shard", 1) * layout.get("dp_replicate", 1) == 2 else 4,
            **layout,
        },
        "global_batch_size": NUM_ROWS,
        "learning_rate": LEARNING_RATE,
        "adam_epsilon": EPSILON,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "precision": "fp32",
    }


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda processes: f"{processes}-processes")
def trained(request, fsdp_ranks, models, data, tmp_path_factory):
    """Provide FSDP's results with so many processes, started once: Qwen3 under all layouts, others under the first."""
    layouts = LAYOUTS[request.param]
    output = tmp_path_factory.mktemp("trained")
    cases = {
        f"qwen3-{name}": {"model": str(models / "qwen3"), "config": make_config(layouts[name])} for name in layouts
    }
    first = next(iter(layouts))
    cases |= {name: {"model": str(models / name), "config": make_config(layouts[first])} for name in MODELS[1:]}
    cases["stateful"]["config"]["layout"]["recompute"] = "full"
    for name, moe in MOE.items():
        cases[name]["config"]["moe"] = moe
        cases[name]["config"]["layout"] |= {"micro_batch_size": 1, "recompute": "full"}
    half = {"model": str(models / "qwen3"), "config": {**make_config(layouts[first]), "precision": "bf16"}}
    cases["half"] = half
    if request.param == 1:
        away, checkpoint = cases["qwen3-activations-offloaded"], [1, str(output / "checkpoint")]
        cases |= {"saved": {**away, "save": checkpoint}, "resumed": {**away, "resume": checkpoint}}
        cases["moe-offloaded"] = {"model": str(models / "moe"), "config": away["config"]}
    others = {name: name for name in MODELS[1:]}
    if request.param == 2:
        for model in ("untied", "moe", "balanced"):
            config = {**make_config(layouts["split"]), "moe": MOE.get(model, {})}
            cases[f"{model}-split"] = {"model": str(models / model), "config": config}
            others[f"{model}-split"] = model
        cases["balanced-sliced"] = {**cases["balanced"], "config": {**make_config({"cp": 2}), "moe": MOE["balanced"]}}
        others["balanced-sliced"] = "balanced"
        spread = {"model": str(models / "balanced"), "config": {**make_config(SPREAD), "moe": MOE["balanced"]}}
        checkpoint = [1, str(output / "checkpoint-spread")]
        cases |= {"balanced-spread": {**spread, "save": checkpoint}, "resumed-spread": {**spread, "resume": checkpoint}}
        # Fused matrices of experts: split, a shard is several rectangles.
        cases["balanced-split"]["save"] = [1, str(output / "checkpoint-fused")]
        cases["resumed-balanced-split"] = {**cases["balanced-split"], "save": None, "resume": checkpoint}
        cases["resumed-balanced"] = {**cases["balanced"], "resume": cases["balanced-split"]["save"]}
        others["balanced-spread"] = "balanced"
        # Written by processes that split matrices or tokens, read by such as shard rows, and the other way round.
        for writer, reader in RESHARDED:
            checkpoint = [1, str(output / f"checkpoint-{writer}")]
            cases[f"saved-{writer}"] = {**cases[f"qwen3-{writer}"], "save": checkpoint}
            cases[f"resumed-{reader}"] = {**cases[f"qwen3-{reader}"], "resume": checkpoint}
        for name in ACCUMULATED:
            config = {**make_config(layouts[name]), "precision": "bf16"}
            cases[f"half-{name}"] = {"model": str(models / "qwen3"), "config": config}
    (output / "spec.json").write_text(json.dumps({"data": data, "cases": cases, "output": str(output)}))
    fsdp_ranks.run("tests.parity.fsdp_program", request.param, output / "spec.json", log=output / "log.txt")
    return output, {f"qwen3-{name}": "qwen3" for name in layouts} | others


def test_losses_and_gradient_norms_equal_those_of_plain_transformers(trained, plain):
    output, cases = trained
    for name, model in cases.items():
        result = json.loads((output / f"{name}.json").read_text())
        losses, grad_norms, _ = plain[model]
        assert result["losses"] == pytest.approx(losses, rel=2e-6), name
        assert result["grad_norms"] == pytest.approx(grad_norms, rel=1e-5), name


def test_the_loss_that_balances_experts_is_that_of_transformers(trained, plain):
    found = json.loads((trained[0] / "balanced.json").read_text())["aux_losses"]
    assert found == pytest.approx([one.item() for one in plain["balanced"][2].aux_losses], rel=1e-5)
    assert plain["balanced"][0] != pytest.approx(plain["moe"][0], rel=1e-4), "that it moved the weights"


def test_frozen_routers_keep_their_bytes(trained, models):
    exported, original = (
        load_file(folder / "model.safetensors") for folder in (trained[0] / "frozen", models / "frozen")
    )
    routers = [name for name in original if name.endswith(".gate.weight")]
    assert len(routers) == 3
    assert all(torch.equal(exported[name], original[name]) for name in routers)


def test_bf16_stays_as_close_to_fp32_as_its_eight_bits_allow(trained, plain):
    result = json.loads((trained[0] / "half.json").read_text())
    assert result["losses"] == pytest.approx(plain["qwen3"][0], rel=2**-8)
    assert result["losses"] != pytest.approx(plain["qwen3"][0], rel=1e-6)
    assert result["grad_norms"] == pytest.approx(plain["qwen3"][1], rel=2**-5)


@pytest.mark.parametrize("trained", [1, 2], indirect=True)
def test_activations_come_back_from_the_host_as_they_left(trained):
    """Offloading changes no bit of losses, gradients and weights, for experts and in a resumed run, too."""
    output, cases = trained
    first = next(iter(cases))
    same = {"qwen3-activations-offloaded": first}
    if first == "qwen3-plain":
        same |= {"moe-offloaded": "moe", "resumed": first}
    for away, here in same.items():
        found, expected = (json.loads((output / f"{name}.json").read_text()) for name in (away, here))
        for metric in ("losses", "grad_norms"):
            assert found[metric] == expected[metric][-len(found[metric]) :], away
        for file in ("{}/model.safetensors", *(("{}.gradients.safetensors",) if away != "resumed" else ())):
            tensors, others = (load_file(output / file.format(name)) for name in (away, here))
            assert tensors.keys() == others.keys()
            assert all(torch.equal(tensors[name], other) for name, other in others.items()), away


@pytest.mark.parametrize("trained", [2], indirect=True)
def test_checkpoints_go_on_with_split_matrices_or_tokens_or_with_shards(trained, plain):
    for _, reader in RESHARDED:
        found = json.loads((trained[0] / f"resumed-{reader}.json").read_text())
        assert found["losses"] == pytest.approx(plain["qwen3"][0][1:], rel=2e-6)
        assert found["grad_norms"] == pytest.approx(plain["qwen3"][1][1:], rel=1e-5)


@pytest.mark.parametrize("trained", [2], indirect=True)
def test_checkpoints_go_on_with_spread_experts_to_the_bit_and_with_split_ones(trained, plain):
    names = "resumed-spread", "resumed-balanced-split", "resumed-balanced", "balanced-spread"
    found, *others, saved = (json.loads((trained[0] / f"{name}.json").read_text()) for name in names)
    for metric in ("losses", "grad_norms", "aux_losses"):
        assert found[metric] == saved[metric][-2:]
        assert [one[metric] for one in others] == [pytest.approx(found[metric], rel=1e-5)] * 2
    resumed, whole = (load_file(trained[0] / name / "model.safetensors") for name in names[::3])
    assert all(torch.equal(resumed[name], one) for name, one in whole.items())


@pytest.mark.parametrize("trained", [2], indirect=True)
def test_gradients_reduced_after_each_micro_batch_give_the_same_curve(trained):
    whole, sharded = (json.loads((trained[0] / f"qwen3-{name}.json").read_text()) for name in ACCUMULATED)
    for metric in ("losses", "grad_norms"):
        assert sharded[metric] == pytest.approx(whole[metric], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("trained", [2], indirect=True)
def test_gradients_of_bf16_are_added_up_in_fp32_either_way(trained):
    """Gradients of bf16 training are accumulated in fp32, sharded or not; in bf16, they would differ by 2^-8."""
    whole, sharded = (load_file(trained[0] / f"half-{name}.gradients.safetensors") for name in ACCUMULATED)
    for name, gradient in whole.items():
        assert gradient.dtype == sharded[name].dtype == torch.float32
        torch.testing.assert_close(sharded[name], gradient, rtol=1e-5, atol=1e-7)


def test_exported_weights_equal_those_of_plain_transformers(trained, plain):
    output, cases = trained
    for name, model in cases.items():
        exported = AutoModelForCausalLM.from_pretrained(output / name, dtype=torch.float32).state_dict()
        for key, weight in plain[model][2].state_dict().items():
            assert (exported[key] - weight).abs().max().item() < 2e-6, (name, key)


def test_the_exported_files_have_the_tensors_of_the_original(trained, models):
    output, cases = trained
    for name, model in cases.items():
        exported, original = (load_file(folder / "model.safetensors") for folder in (output / name, models / model))
        assert {key: value.shape for key, value in exported.items()} == {
            key: value.shape for key, value in original.items()
        }


def test_the_exported_model_gives_the_log_probabilities_that_it_had_in_training(trained, data):
    output, cases = trained
    for name in cases:
        exported = AutoModelForCausalLM.from_pretrained(output / name, dtype=torch.float32)
        with torch.no_grad():
            expected = [-negative_log_likelihood(exported, torch.tensor([document])).item() for document in data[0][0]]
        result = json.loads((output / f"{name}.json").read_text())
        assert result["log_probabilities"] == pytest.approx(expected, rel=1e-5), name


def test_single_weights_that_stay_in_fp32_train_in_one_process_as_in_two_and_as_transformers_computes(
    fsdp_ranks, data, tmp_path
):
    """OLMo-Hybrid's decays are fp32 amid a group of bf16 weights: as shards, and their gradients beside bf16 ones."""
    tiny_model("olmo_hybrid").save_pretrained(tmp_path / "model")
    results, gradients = [], []
    for processes in (1, 2):
        config = {**make_config({"dp_shard": processes, "micro_batch_size": 1}), "precision": "bf16"}
        spec = {"data": data, "output": str(tmp_path), "cases": {}}
        spec["cases"][f"trained-{processes}"] = {"model": str(tmp_path / "model"), "config": config}
        (tmp_path / "spec.json").write_text(json.dumps(spec))
        fsdp_ranks.run("tests.parity.fsdp_program", processes, tmp_path / "spec.json", log=tmp_path / "log.txt")
        results.append(json.loads((tmp_path / f"trained-{processes}.json").read_text()))
        gradients.append(load_file(tmp_path / f"trained-{processes}.gradients.safetensors"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    kept = {name for name, weight in plain.named_parameters() if weight.dtype == torch.float32}
    assert kept and all(name.endswith("A_log") for name in kept)
    documents = [torch.tensor([document]) for row in data[0] for document in row]
    loss = sum(negative_log_likelihood(plain, one).item() for one in documents)
    loss /= sum(one.shape[1] - 1 for one in documents)
    assert results[0]["losses"][0] == pytest.approx(loss, abs=1e-6)
    for metric in ("losses", "grad_norms"):
        assert results[1][metric] == pytest.approx(results[0][metric], rel=1e-5), metric
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-7)
    assert all(gradients[0][name].abs().max() > 0 for name in kept)
