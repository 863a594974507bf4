"""Muon and low-precision AdamW under FSDP2 compute the same on any number of processes, and after a resume.

Muon is compared with its formula by singular values; AdamW rounds its moments or weights at random.
"""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from stages.engines.fsdp.optimizer import COEFFICIENTS, MuonAndAdamW, orthogonalized
from stages.engines.settings import MuonSettings
from tests.parity.plain_adam import trainer_parameter_groups
from tests.parity.test_fsdp import (
    EPSILON,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    WEIGHT_DECAY,
    data,  # noqa: F401
    make_config,
    models,  # noqa: F401
    negative_log_likelihood,
)

MODELS = ("untied", "moe")
MOMENTUM, NUM_ITERATIONS = 0.95, 5
SAVED_AFTER = 2
DIFFERENCE = 2e-6
"""Largest tolerated difference between compared weights after three optimizer steps."""
LAYOUTS = {"1": {}, "2": {"dp_shard": 2}, "split": {"tp": 2}}
OTHERS = {
    "sliced": {"cp": 2},
    "split-sharded": {"dp_shard": 2, "tp": 2, "micro_batch_size": 1},
    "split-sliced": {"cp": 2, "tp": 2},
    "spread": {"dp_shard": 2, "ep": 2},
    "spread-split": {"dp_shard": 2, "ep": 2, "tp": 2},
}
"""Layouts of nightly tests, of two or four processes."""
MOMENTS = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
LOW_PRECISION = {
    "moments": {"optimizer": MOMENTS},
    "weights": {"optimizer": {**MOMENTS, "bf16_stochastic_round": True}, "precision": "bf16", "learning_rate": 1e-3},
}


def by_singular_values(matrices):
    """Return Muon's update in fp64 by definition: its Newton-Schulz polynomial applied to the singular values."""
    left, values, right = torch.linalg.svd(matrices.double(), full_matrices=False)
    values = values / values.norm(dim=-1, keepdim=True)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        values = a * values + b * values**3 + c * values**5
    return left @ torch.diag_embed(values) @ right


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (3, 7, 5)])
def test_singular_values_alone_change(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalized(matrices, NUM_ITERATIONS)
    torch.testing.assert_close(found.double(), by_singular_values(matrices), rtol=0, atol=1e-5)


def test_one_process_moves_a_matrix_as_torch_does():
    """Muon on one process changes a weight matrix as torch.optim.Muon does, within rounding errors of bf16."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 10, generator=generator)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    group = {"params": [ours], "weight_decay": 0.1, "is_muon": True}
    steps = [MuonAndAdamW([group], MuonSettings(), torch.bfloat16, lr=0.01)]
    steps += [torch.optim.Muon([theirs], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")]
    for _ in range(5):
        gradient = torch.randn(6, 10, generator=generator)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        for one in steps:
            one.step()
    moved = (theirs - start).abs().max().item()
    assert (ours - theirs).abs().max().item() < 2**-5 * moved


@pytest.fixture(scope="module")
def trained(models, data, fsdp_ranks, tmp_path_factory):  # noqa: F811
    """Provide results of Muon and low-precision AdamW by layout, uninterrupted and resumed."""
    output = tmp_path_factory.mktemp("muon")
    for name, layout in LAYOUTS.items():
        train(layout, output / name, models, data, fsdp_ranks, output / "checkpoint")
    return output


def train(layout, folder, models, data, ranks, checkpoint=None):  # noqa: F811
    """Train by Muon and by low-precision AdamW; one process saves checkpoints, from which all go on."""
    folder.mkdir()
    processes = math.prod(layout.get(name, 1) for name in ("dp_shard", "cp", "tp"))
    config = {**make_config(layout), "optimizer": {"name": "muon"}}
    has_experts = layout.get("ep", 1) > 1
    cases = {name: {"model": str(models / name), "config": config} for name in MODELS[has_experts:]}
    for name, fields in LOW_PRECISION.items():
        cases[name] = {"model": str(models / "moe"), "config": {**make_config(layout), **fields}}
    for name in ("moe", *LOW_PRECISION) if checkpoint else ():
        saved = [SAVED_AFTER, f"{checkpoint}-{name}"]
        cases[f"{name}-resumed"] = {**cases[name], "resume": saved}
        if processes == 1:
            cases[name] = {**cases[name], "save": saved}
    (folder / "spec.json").write_text(json.dumps({"data": data, "cases": cases, "output": str(folder)}))
    ranks.run("tests.parity.fsdp_program", processes, folder / "spec.json", log=folder / "log.txt")


@pytest.mark.parametrize("name", MODELS)
def test_every_number_of_processes_learns_what_the_formula_says(name, trained, models, data):  # noqa: F811
    losses, model = learn_plainly(models / name, data)
    for layout in LAYOUTS:
        result = json.loads((trained / layout / f"{name}.json").read_text())
        assert result["losses"] == pytest.approx(losses, rel=2e-6), layout
        assert_same_weights(trained / layout / name, model.state_dict(), DIFFERENCE)


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
def test_parts_of_matrices_tokens_or_experts_learn_what_the_formula_says(name, trained, models, data, fsdp_ranks):  # noqa: F811
    folder = trained / name
    train(OTHERS[name], folder, models, data, fsdp_ranks)
    for path in [one for one in MODELS if (folder / one).exists()]:
        losses, model = learn_plainly(models / path, data)
        assert json.loads((folder / f"{path}.json").read_text())["losses"] == pytest.approx(losses, rel=2e-6)
        assert_same_weights(folder / path, model.state_dict(), DIFFERENCE)
    assert share_of_other_weights(folder / "moments", trained / "1" / "moments") < 0.02


def test_a_run_goes_on_from_its_checkpoint_under_every_layout(trained):
    whole = json.loads((trained / "1" / "moe.json").read_text())
    weights = AutoModelForCausalLM.from_pretrained(trained / "1" / "moe", dtype=torch.float32).state_dict()
    for layout in LAYOUTS:
        assert_same_weights(trained / layout / "moe-resumed", weights, 0.0 if layout == "1" else DIFFERENCE)
        result = json.loads((trained / layout / "moe-resumed.json").read_text())
        assert result["losses"] == pytest.approx(whole["losses"][SAVED_AFTER:], rel=2e-6)


def share_of_other_weights(folder, other):
    found, expected = (load_file(one / "model.safetensors") for one in (folder, other))
    different = [((found[name] - weight).abs() > DIFFERENCE).flatten() for name, weight in expected.items()]
    return torch.cat(different).float().mean().item()


def test_two_processes_round_moments_to_the_same_side_as_one(trained):
    """AdamW rounds moments to bf16 at random, but equally on one process and two; else most weights would differ."""
    whole = json.loads((trained / "1" / "moments.json").read_text())["losses"]
    for layout in LAYOUTS:
        assert share_of_other_weights(trained / layout / "moments", trained / "1" / "moments") < 0.02
        losses = json.loads((trained / layout / "moments.json").read_text())["losses"]
        assert losses == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("name", LOW_PRECISION)
def test_what_is_rounded_at_random_goes_on_as_if_uninterrupted(name, trained):
    assert share_of_other_weights(trained / "1" / f"{name}-resumed", trained / "1" / name) == 0
    whole = json.loads((trained / "1" / f"{name}.json").read_text())["losses"]
    for layout in LAYOUTS:
        resumed = json.loads((trained / layout / f"{name}-resumed.json").read_text())["losses"]
        assert resumed == pytest.approx(whole[SAVED_AFTER:], rel=1e-4 if name == "moments" else 2**-7)


def test_weights_without_a_copy_in_fp32_are_what_bf16_can_hold_and_move(trained, models):  # noqa: F811
    start, moved = (load_file(one / "model.safetensors") for one in (models / "moe", trained / "1" / "weights"))
    for name, weight in moved.items():
        assert torch.equal(weight, weight.bfloat16().float()), "held in bf16, and written in fp32"
        if weight.ndim > 1:  # norms have few, at 1, where bf16 is coarse
            assert not torch.equal(weight, start[name].bfloat16().float()), name


def assert_same_weights(folder, expected, difference):
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for key, weight in expected.items():
        assert (found[key] - weight).abs().max().item() <= difference, key


def learn_plainly(folder, global_batches):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    matrices = {name: one for name, one in model.named_parameters() if is_matrix_of_a_layer(name, one)}
    momenta = {name: torch.zeros_like(one) for name, one in matrices.items()}
    groups = trainer_parameter_groups(model, WEIGHT_DECAY)
    mine = {id(one) for one in matrices.values()}
    rest = [{**group, "params": [one for one in group["params"] if id(one) not in mine]} for group in groups]
    adam = torch.optim.AdamW(rest, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=EPSILON)
    losses = []
    for rows in global_batches:
        documents = [torch.tensor([document]) for row in rows for document in row]
        count = sum(document.shape[1] - 1 for document in documents)
        loss = sum(negative_log_likelihood(model, document).double() for document in documents) / count
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for name, one in matrices.items():
            move(one.data, one.grad, momenta[name])
        adam.step()
        model.zero_grad()
    return losses, model


def is_matrix_of_a_layer(name, parameter):
    return "layers." in name and parameter.ndim > 1


@torch.no_grad()
def move(weight, gradient, momentum):
    momentum.mul_(MOMENTUM).add_(gradient, alpha=1 - MOMENTUM)
    looked_ahead = (1 - MOMENTUM) * gradient + MOMENTUM * momentum
    ratio = 0.2 * math.sqrt(max(weight.shape[-2:]))
    change = by_singular_values(looked_ahead).float()
    weight.mul_(1 - LEARNING_RATE * WEIGHT_DECAY).sub_(LEARNING_RATE * ratio * change)
