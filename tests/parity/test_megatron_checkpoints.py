"""A run that resumes from a checkpoint under any layout or engine trains as the uninterrupted run does.

`make test` leaves out journeys whose beginnings, ends and models others have, too.
"""

import json

import pytest
from torch.distributed.checkpoint import FileSystemReader

from tests.parity.megatron_cases import make_models
from tests.parity.megatron_state import launch

TP, PP = {"tp": 2}, {"pp": 2}
SP = {"tp": 2, "sequence_parallel": True}
SHARDED, REPLICATED, EXPERTS = {"dp_shard": 2}, {"dp_replicate": 2}, {"dp_shard": 2, "ep": 2}
ADAPTER = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]}
OF_EXPERTS = {"rank": 3, "alpha": 8}
TOLERANCE = 1e-6
"""Tolerance of a training loss near 5; layouts differ by as much even without a checkpoint."""


def journey(model, start, *ends, precision="fp32", adapter=None):
    """Return a case: engine, layout and precision that save a checkpoint and resume it, and others that resume it."""
    places = [[engine, layout, precision] for engine, layout in (start, start, *ends)]
    return {"model": model, "from": places[0], "to": places[1:], "adapter": adapter}


def megatron(layout):
    return ("megatron", layout)


FSDP = ("fsdp", SHARDED)
JOURNEYS = {
    "tp": journey("qwen3", megatron(SP), megatron(PP), megatron(SHARDED), FSDP),
    "dp-sharded": journey("qwen3", megatron(SHARDED), megatron(TP), megatron({**PP, "vpp": 2}), FSDP),
    "fsdp": journey("qwen3", FSDP, megatron(SHARDED), megatron(PP), megatron({"cp": 2})),
    "context": journey("qwen3", megatron({"cp": 2}), megatron(SHARDED)),
    "odd-vocabulary": journey("qwen2", megatron(TP), megatron(PP), megatron(REPLICATED)),
    "experts": journey("qwen3-moe", megatron(EXPERTS), megatron({**SP, "etp": 2}), megatron(PP), FSDP),
    "experts-of-fsdp": journey("mixtral", FSDP, megatron(EXPERTS)),
    "bf16": journey("qwen3", megatron(SHARDED), precision="bf16"),
    "adapter": journey("qwen3", megatron(SP), megatron({**PP, "vpp": 2}), megatron(SHARDED), FSDP, adapter=ADAPTER),
    "adapter-of-fsdp": journey("qwen3", FSDP, megatron(SP), megatron(SHARDED), adapter=ADAPTER),
    "adapter-bf16": journey("qwen3", megatron(SHARDED), precision="bf16", adapter=ADAPTER),
    "adapter-experts": journey(
        "qwen3-moe", megatron(EXPERTS), megatron({**SP, "etp": 2}), megatron(PP), FSDP, adapter=OF_EXPERTS
    ),
    "adapter-experts-of-fsdp": journey("qwen3-moe", FSDP, megatron(EXPERTS), adapter=OF_EXPERTS),
    "adapter-dropout": journey("qwen3", megatron(TP), adapter={**ADAPTER, "dropout": 0.1}),
}
BY_NIGHT = ("fsdp", "context", "odd-vocabulary", "adapter-bf16", "adapter-experts-of-fsdp")
NAMES = [pytest.param(name, marks=[pytest.mark.nightly] * (name in BY_NIGHT)) for name in JOURNEYS]
LATER = [{"tp": 2, "dp_shard": 2}, {"pp": 2, "dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}]
"""Layouts of four processes under which runs of two processes are resumed."""
LATER_EXPERTS = [{**SP, "dp_shard": 2, "ep": 2}, {"pp": 2, "dp_shard": 2, "ep": 2}]


@pytest.fixture(scope="module")
def losses(megatron_ranks, tmp_path_factory):
    """Provide the losses after a checkpoint: of the run that saved it, and of those that resumed from it, by case."""
    folder = tmp_path_factory.mktemp("checkpoints")
    checkpoints = {name: str(folder / name) for name in JOURNEYS if name not in BY_NIGHT}
    found = travel(megatron_ranks, folder, checkpoints, misfit=["llama", checkpoints["tp"]])
    later = [
        {
            "model": model,
            "from": None,
            "checkpoint": checkpoints[name],
            "to": [["megatron", to, "fp32"] for to in layouts],
        }
        for model, name, layouts in (("qwen3", "dp-sharded", LATER), ("qwen3-moe", "experts", LATER_EXPERTS))
    ]
    launch(megatron_ranks, 4, folder / "models", folder / "four", journeys=later)
    dense, experts = json.loads((folder / "four" / "journeys.json").read_text())
    found["keys"] = {name: stored_keys(checkpoints[name]) for name in ("adapter", "adapter-of-fsdp")}
    found["misfit"] = (folder / "two" / "misfit.txt").read_text()
    return {**found, "four": {"dp-sharded": dense["moved"], "experts": experts["moved"]}}


@pytest.fixture(scope="module")
def losses_by_night(megatron_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints-by-night")
    return travel(megatron_ranks, folder, {name: str(folder / name) for name in BY_NIGHT})


def travel(ranks, folder, checkpoints, **options):
    """Save and resume the checkpoints of some cases on two processes; return what came out by case."""
    make_models(folder / "models")
    todo = [{**JOURNEYS[name], "checkpoint": checkpoint} for name, checkpoint in checkpoints.items()]
    launch(ranks, 2, folder / "models", folder / "two", journeys=todo, **options)
    return dict(zip(checkpoints, json.loads((folder / "two" / "journeys.json").read_text()), strict=True))


@pytest.fixture
def outcome(request, name):
    return request.getfixturevalue("losses_by_night" if name in BY_NIGHT else "losses")[name]


def stored_keys(checkpoint):
    """Return a checkpoint's keys, without those of optimizer parameter groups, which only FSDP's writes."""
    keys = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {key for key in keys if not key.startswith("optimizer.param_groups.")}


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_equals_the_uninterrupted_one_exactly(outcome, name):
    assert outcome["moved"][0] == outcome["stayed"]
    assert len(set(outcome["stayed"])) == len(outcome["stayed"]) > 1


@pytest.mark.parametrize("name", NAMES)
def test_under_another_layout_or_engine_the_loss_goes_on_as_if_nothing_had_happened(outcome, name):
    for place, moved in zip(JOURNEYS[name]["to"][1:], outcome["moved"][1:], strict=True):
        assert moved == pytest.approx(outcome["stayed"], abs=TOLERANCE), place


@pytest.mark.parametrize("name", ["dp-sharded", "experts"])
def test_on_more_processes_the_loss_goes_on_as_if_nothing_had_happened(losses, name):
    for moved in losses["four"][name]:
        assert moved == pytest.approx(losses[name]["stayed"], abs=TOLERANCE)


def test_checkpoints_of_adapters_hold_nothing_of_the_base(losses):
    assert losses["keys"]["adapter"] == losses["keys"]["adapter-of-fsdp"]
    layers = {key.split("layers.")[1].split(".lora_")[0] for key in losses["keys"]["adapter"]}
    assert {layer.rpartition(".")[2] for layer in layers} == set(ADAPTER["target_modules"])
    num_kept = 2 * (1 + 3)  # of A and of B: the weight, Adam's moments and count of steps
    assert len(losses["keys"]["adapter"]) == len(layers) * num_kept


def test_what_dropout_drops_changes_what_is_learned(losses):
    """LoRA dropout changes what is learned, and drops the same activations on both ranks.

    Copies of A that drift apart would fail `test_a_resumed_run…`.
    """
    assert losses["adapter-dropout"]["stayed"] != pytest.approx(losses["adapter"]["stayed"], abs=1e-4)


def test_a_checkpoint_of_another_model_is_named_by_both_engines(losses):
    messages = losses["misfit"].splitlines()
    assert len(messages) == 2
    for message in messages:
        assert "is of another model" in message
        assert "model.lm_head.weight is missing" in message
