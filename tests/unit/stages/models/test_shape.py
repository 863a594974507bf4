"""Parameters and FLOPs that we count from a model's config equal those of its Transformers model.

By formulas, and by a walk through the model without weights.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stages.core.errors import ModelError
from stages.models import walked
from stages.models.facts import ROTARY_FAMILIES, ModelFacts
from stages.models.shape import LatentAttention, ModelShape
from stages.models.transformers_flops import model_flops
from stages.models.walk import Walk, walk
from stages.models.walk_answer import answer
from stages.parallel.engines.megatron import MegatronRules
from stages.parallel.layout import Layout
from stages.planner.activations import kept_bytes_per_token
from stages.planner.adapted import PlannedAdapter
from stages.planner.costs import StepCase
from stages.planner.engines.registry import COSTS
from stages.planner.split import split_values
from stages.planner.workload import Workload
from tests.zoo.models import tiny_config
from tests.zoo.planning import MOST_FLOPS_ERROR, built, forward_flops
from tests.zoo.splitting import fields_to_split
from tests.zoo.text import SPLIT

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 50}
GROUPED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48}
CONFIGS = [
    ("llama", {**GROUPED, "attention_bias": True, "mlp_bias": True}),
    ("llama", {**GROUPED, "head_dim": 16, "tie_word_embeddings": True}),
    ("mistral", {**GROUPED, "sliding_window": 7}),
    ("qwen2", GROUPED),
    ("qwen3", {**GROUPED, "head_dim": 16}),
    ("qwen3_moe", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    (
        "qwen3_moe",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
    ("mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 50, "n_positions": 20}),
    ("opt", {**SIZES, "ffn_dim": 48, "max_position_embeddings": 20, "word_embed_proj_dim": 32}),
    ("bloom", {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 50}),
    ("mpt", {"d_model": 32, "n_layers": 3, "n_heads": 4, "vocab_size": 50}),
]


def transformers_model(family: str, fields: dict) -> tuple[dict, torch.nn.Module]:
    """Return a model config as its JSON file holds it, and the Transformers model of it without weights."""
    config = AutoConfig.for_model(family, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return json.loads(config.to_json_string(use_diff=False)), model


@pytest.mark.parametrize(("family", "fields"), CONFIGS)
def test_parameters_are_those_of_the_transformers_model(family, fields):
    config, model = transformers_model(family, fields)
    assert ModelFacts(config).shape.num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("family", "fields"), [case for case in CONFIGS if case[0] not in ("bloom", "mpt")])
def test_flops_are_those_counted_on_the_model(family, fields):
    config, model = transformers_model(family, fields)
    counted, expected = ModelFacts(config).shape.flops(), model_flops(model)
    assert counted.training([17, 3], 11) == pytest.approx(expected.training([17, 3], 11))


def test_text_part_of_a_multimodal_config_is_read():
    text = {"model_type": "qwen3", **GROUPED, "head_dim": 8}
    assert ModelFacts({"model_type": "qwen3_vl", "text_config": text}).shape.num_layers == 3


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"])
def test_what_is_lacking_is_named(field):
    config = {"model_type": "llama", **GROUPED}
    del config[field]
    with pytest.raises(ModelError, match=field):
        _ = ModelFacts(config).shape


@pytest.mark.parametrize("value", [0, -4, 2.5, "8", True])
def test_a_size_that_is_no_positive_whole_number_is_named(value):
    with pytest.raises(ModelError, match="vocab_size"):
        _ = ModelFacts({"model_type": "llama", **GROUPED, "vocab_size": value}).shape


def test_unknown_family_is_refused_with_those_known():
    with pytest.raises(ModelError, match=r"'mamba'.*llama"):
        _ = ModelFacts({"model_type": "mamba", **GROUPED}).shape


def test_a_shape_survives_being_json():
    dense = ModelFacts({"model_type": "llama", **GROUPED}).shape
    mixture = replace(dense, num_experts=8, experts_per_token=2, expert_ffn_size=512, dense_layers=frozenset({0, 3}))
    assert ModelShape.from_json(dense.to_json()) == dense
    assert ModelShape.from_json(mixture.to_json()) == mixture
    earlier = {**json.loads(dense.to_json()), "rope_theta": 1e4}  # a field of shapes that were logged before
    assert ModelShape.from_json(json.dumps(earlier)) == dense


def test_latent_attention_has_the_parameters_and_flops_of_the_transformers_model():
    """Parameters and FLOPs of a DeepSeek-V3 with latent attention equal those of its Transformers model.

    Its shared expert is counted as one to which every token is routed; norms are not counted.
    """
    fields = {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
        "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "q_lora_rank": 96, "kv_lora_rank": 64,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    }  # fmt: skip
    _, model = transformers_model("deepseek_v3", fields)
    shape = ModelShape(
        3, 256, 4, 4, 32, 512, 512, num_experts=9, experts_per_token=3, expert_ffn_size=128,
        dense_layers=frozenset({0}), latent=LatentAttention(query_rank=96, kv_rank=64, rotary_dim=16),
    )  # fmt: skip
    norms, routers = 3 * (96 + 64), 2 * 256
    assert shape.num_parameters == sum(one.numel() for one in model.parameters()) - norms + routers
    counted = model_flops(model).training([64, 32], 96)
    assert shape.flops().training([64, 32], 96) == pytest.approx(counted, rel=0.01)


KINDS = ("gemma3n_text", "gemma3_text", "deepseek_v3", "qwen3_5_text", "bamba", "gpt_neox")
"""Families with products between layers, windows, latent attention and experts, gated deltas, Mamba, none of these."""


@pytest.mark.parametrize(("family", "fields"), CONFIGS)
def test_formulas_and_walks_agree(family, fields):
    config = AutoConfig.for_model(family, **fields)
    found, expected = walk(config), ModelFacts(config.to_dict()).shape
    assert found.num_parameters == expected.num_parameters
    counted = found.flops().training([17, 3], 11)
    assert counted == pytest.approx(expected.flops().training([17, 3], 11), rel=0.001)
    assert found.tied_embeddings == expected.tied_embeddings
    assert (found.num_experts, found.experts_per_token) == (expected.num_experts, expected.experts_per_token)
    assert found.dense_layers == expected.dense_layers
    assert found.kv_cache_bytes(7, 2, 1) == expected.kv_cache_bytes(7, 2, 1)
    assert found.has_split_plan == expected.has_split_plan == (family in ROTARY_FAMILIES)
    assert found.packs == expected.packs == (family not in ("bloom", "mpt"))
    assert not found.split_flaw and not any(kind.carries_state for kind in found.kinds)
    assert split_values(found) == pytest.approx(split_values(expected))


@pytest.mark.parametrize("family", KINDS)
def test_flops_are_those_that_torch_counts(family, tmp_path):
    config = tiny_config(family)
    config.save_pretrained(tmp_path)
    flops, counted = forward_flops(walk(config), built(tmp_path))
    assert flops == pytest.approx(counted, rel=MOST_FLOPS_ERROR)


def test_layers_have_kinds_with_windows_of_their_own():
    shape = walk(tiny_config("gemma3_text"))
    windowed, full = shape.kinds
    assert (windowed.layers, full.layers) == ((0,), (1,))
    width = 4 * (32 + 32)
    assert [(one.width, one.window_tokens) for one in shape.flops().attention] == [(width, 4), (width, None)]
    assert ModelShape.from_json(shape.to_json()) == shape
    assert hash(ModelShape.from_json(shape.to_json())) == hash(shape)


@pytest.mark.parametrize("family", ["gemma4", "qwen3_next"])
def test_a_layer_counts_as_an_equal_one_that_was_walked(family, monkeypatch):
    config = tiny_config(family)
    found = walk(config)
    monkeypatch.setattr(Walk, "_once", lambda self, layer, *_: layer.forward)
    assert walk(config) == found


def test_a_walk_runs_apart_once_for_each_config(tmp_path, monkeypatch):
    """A process that plans imports neither torch nor Transformers, and waits for one walk only."""
    tiny_config("gemma").save_pretrained(tmp_path / "model")
    program = (
        "import sys; from pathlib import Path; from stages.models.facts import ModelFacts; "
        "from stages.models.walked import shape_of; "
        f"shape = shape_of(ModelFacts(Path({str(tmp_path / 'model')!r})), print); print(shape.num_parameters); "
        "print('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    first, second = (
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.splitlines()
        for _ in range(2)
    )
    number = str(walk(tiny_config("gemma")).num_parameters)
    assert first == [
        "measuring the layers of the gemma model, once for its config.json and this Transformers (some seconds)",
        number,
        "False",
    ]
    assert second == [number, "False"]


def test_a_walk_that_takes_too_long_is_named_and_tried_again_a_day_later(tmp_path, monkeypatch):
    tiny_config("gemma").save_pretrained(tmp_path / "model")
    facts, reason = ModelFacts(tmp_path / "model"), r"gemma model .* took more than 0.1 s; it is tried again"
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    monkeypatch.setattr(walked, "LIMIT_S", 0.1)
    with pytest.raises(ModelError, match=reason):
        walked.shape_of(facts)
    monkeypatch.undo()
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    with pytest.raises(ModelError, match=reason):  # without a walk, which would succeed
        walked.shape_of(facts)
    (kept,) = (tmp_path / "cache/shapes").glob("*.json")
    os.utime(kept, (0, 0))
    assert walked.shape_of(facts).num_parameters == walk(tiny_config("gemma")).num_parameters


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"model_type": "unheard_of", "auto_map": {"AutoConfig": "theirs.Config"}}, "unheard_of.*not run"),
        ({"model_type": "gemma", "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"model_type": "gemma", "hidden_size": 33, "num_attention_heads": "many"}, "num_attention_heads"),
        ({"model_type": "vit"}, "vit"),
        ({}, "model_type"),
    ],
)
def test_a_config_that_makes_no_model_is_refused(fields, problem):
    assert re.search(problem, answer(json.dumps({"config": fields, "files": {}}))["error"])


@pytest.mark.parametrize(("family", "fields"), [case for case in CONFIGS if case[0] in ROTARY_FAMILIES])
def test_layers_keep_as_many_bytes_by_formulas_as_by_walks(family, fields):
    """Within the bound of what a step takes on fake GPUs: both leave other small things out."""
    config = AutoConfig.for_model(family, **{**fields, "hidden_size": 512, "head_dim": 64, "intermediate_size": 768})
    shapes = walk(config), ModelFacts(config.to_dict()).shape
    # Formulas take the inputs that adapters keep at the mean width of dense layers and mixtures, which differ here.
    adapters = (None,) if "mlp_only_layers" in fields else (None, PlannedAdapter(rank=4))
    # Adapters go with no split matrices here.
    for adapter, layout in ((None, Layout(tp=2)), *product(adapters, [Layout()])):
        workload = Workload(64, 64, "bf16", adapter=adapter)
        found, expected = (
            kept_bytes_per_token(StepCase(shape, COSTS["fsdp"], layout, workload, COSTS["fsdp"].program(layout)))
            for shape in shapes
        )
        assert found == pytest.approx(expected, rel=0.1), (adapter, layout)


@pytest.mark.parametrize(
    ("family", "fields", "is_split"),
    [("cohere", {}, True), ("cohere", {"use_qk_norm": True}, False), ("granite_swa", {}, False)],
)
def test_a_plan_must_split_what_layers_have_by_heads(family, fields, is_split):
    """Cohere's norms have a row for each head, which its plan does not name; Granite's sinks are a vector of them."""
    config = AutoConfig.for_model(family, **{**SPLIT, **fields})
    assert walk(config).has_split_plan is is_split


@pytest.mark.parametrize(
    ("family", "flaw"),
    [
        ("apertus", "gradients of model.layers.0.mlp.act_fn.alpha_p"),
        ("qwen3_vl_moe", "gradients of model.language_model.layers.0.self_attn.q_norm.weight"),
        ("gemma3n_text", "code sums over states"),
        ("llama4_text", "Llama4TextDecoderLayer gives parts of states to the next layer"),
        ("gemma4", "code beside the embedding reads its weights"),
    ],
)
def test_a_walk_sees_what_a_plan_would_change(family, flaw):
    assert flaw in walk(tiny_config(family, **fields_to_split(family))).split_flaw


def test_what_a_plan_would_change_is_a_matter_of_the_config_not_of_the_family():
    """Gemma 3n leaves no activations out here, and Gemma 4 has no embeddings for each layer."""
    config = tiny_config("gemma3n_text", activation_sparsity_pattern=[0.0] * 4, num_key_value_heads=2)
    assert not walk(config).split_flaw
    config = tiny_config("gemma4", **fields_to_split("gemma4"))
    config.text_config.hidden_size_per_layer_input = 0
    assert not walk(config).split_flaw


def test_a_walked_model_is_refused_by_megatron():
    shape = walk(tiny_config("gemma3_text"))
    assert "gemma3_text" in " ".join(MegatronRules().model_errors(Layout(), shape))
