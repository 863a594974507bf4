"""The planner's predicted memory of adapter training matches the memory measured on a CPU, under both engines.

`make test` has each engine, and each kind of model, once; `make nightly` the others.
"""

import json
from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.parity.ranks import started_ranks

ERROR = 0.1
SHARED = {
    "kind": "train", "method": "sft", "model": "base", "data": {"dataset": "rows", "sequence_length": 64},
    "global_batch_size": 1, "steps": 2, "learning_rate": 1e-3, "precision": "fp32",
}  # fmt: skip
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MODELS = {
    "llama": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8},
    "qwen3_moe": {"hidden_size": 512, "moe_intermediate_size": 1024, "num_hidden_layers": 8, "num_experts": 16,
                  "num_experts_per_tok": 2, "num_key_value_heads": 4, "head_dim": 32},
}  # fmt: skip
"""Config fields of a Llama and a Qwen3-MoE of 135 and 205 million parameters (0.5 and 0.8 GiB in fp32)."""
EXPERT_CASES = {
    "experts, fsdp": (1, {"adapter": {"rank": 8}}),
    "experts, megatron EP2": (
        2,
        {"adapter": {"rank": 8}, "engine": "megatron", "global_batch_size": 2, "layout": {"dp_shard": 2, "ep": 2}},
    ),
}
CASES = {
    "base in fp32": (1, {"adapter": {"rank": 16}}),
    "base in bf16, rank 64 on attention": (
        1,
        {"adapter": {"rank": 64, "target_modules": ATTENTION}, "precision": "bf16"},
    ),
    "base in nf4": (1, {"adapter": {"rank": 16, "base_precision": "nf4"}, "precision": "bf16"}),
    "base in int8, rank 8 of half of the layers": (
        1,
        {"adapter": {"rank": 8, "base_precision": "int8", "target_modules": ["up_proj", "v_proj"],
                     "layers_to_transform": [4, 5, 6, 7]}},
    ),
    "sharded over 2 processes": (2, {"adapter": {"rank": 32}, "global_batch_size": 2, "layout": {"dp_shard": 2}}),
    "megatron TP2": (
        2,
        {"adapter": {"rank": 16}, "engine": "megatron", "layout": {"tp": 2, "sequence_parallel": True}},
    ),
}  # fmt: skip
NIGHTLY = (
    "base in fp32",
    "base in bf16, rank 64 on attention",
    "base in int8, rank 8 of half of the layers",
    "sharded over 2 processes",
    "experts, megatron EP2",
)
"""Cases for nightly tests, whose features the others cover; unit tests count base models' and adapters' bytes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Provide a function that returns the folder of a model of an architecture, written at the first call."""

    @cache
    def make(family):
        config = AutoConfig.for_model(family, **MODELS[family], num_attention_heads=16, vocab_size=512)
        with torch.device("meta"):
            causal_lm = AutoModelForCausalLM.from_config(config)
        causal_lm.to_empty(device="cpu")
        for parameter in causal_lm.parameters():
            torch.nn.init.normal_(parameter.data, std=0.02)
        folder = tmp_path_factory.mktemp("base")
        causal_lm.to(torch.bfloat16).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def ranks():
    """Provide a parent process of ranks without the imports of other tests, which would count as the ranks' memory."""
    with started_ranks() as started:
        yield started


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY), id=name)
        for name in {**CASES, **EXPERT_CASES}
    ],
)
def test_the_frozen_base_and_what_learns_take_what_is_predicted(name, model, ranks, tmp_path):
    processes, fields = {**CASES, **EXPERT_CASES}[name]
    folder = model("qwen3_moe" if name in EXPERT_CASES else "llama")
    output = tmp_path / "memory.json"
    ranks.run(
        "tests.parity.memory_program", processes, folder, output, json.dumps({**SHARED, **fields}), log=tmp_path / "log"
    )
    found = json.loads(output.read_text())
    assert found["predicted_gib"] == pytest.approx(max(found["measured_gib"]), rel=ERROR), found


@pytest.mark.nightly
def test_gradients_that_are_reduced_after_each_micro_batch_spare_what_is_predicted(model, ranks, tmp_path):
    """Reducing gradients after each micro-batch saves as much measured memory as the planner predicts.

    `make test` covers this by `tests/fake_gpu`, whose fake devices count such a layout's bytes exactly.
    """
    found = {}
    for accumulate in ("whole", "sharded"):
        output = tmp_path / f"{accumulate}.json"
        fields = {**SHARED, "global_batch_size": 4, "layout": {"dp_shard": 2, "accumulate": accumulate}}
        ranks.run("tests.parity.memory_program", 2, model("llama"), output, json.dumps(fields), log=tmp_path / "log")
        found[accumulate] = json.loads(output.read_text())
        assert found[accumulate]["predicted_gib"] == pytest.approx(max(found[accumulate]["measured_gib"]), rel=ERROR)
    whole, sharded = found["whole"], found["sharded"]
    spared_gib = max(whole["measured_gib"]) - max(sharded["measured_gib"])
    # Whole gradients go, shards stay. One layer's whole ones are predicted beside, which may be gone at the peak.
    predicted_gib, most_gib = whole["predicted_gib"] - sharded["predicted_gib"], sharded["parts_gib"]["gradients"]
    assert (1 - ERROR) * predicted_gib < spared_gib < (1 + ERROR) * most_gib, found
