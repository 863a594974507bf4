"""Invalid parallel layouts are refused when the recipe is read; any engine and layout can resume a checkpoint."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from flows.recipe.recipe import load_stages
from stages.core.contract import ModelAtHand
from stages.core.errors import LayoutError, RecipeError
from stages.kinds.train.at_hand import model_findings
from stages.kinds.train.checks import media_errors
from stages.parallel.layout import Layout
from tests.train_stage import make_config


def train_stage(**fields):
    data = {"dataset": "problems", "sequence_length": 64}
    return {
        "kind": "train", "method": "sft", "model": "base", "data": data, "steps": 1, "global_batch_size": 4,
        "learning_rate": 1e-3, **fields,
    }  # fmt: skip


def recipe(**fields):
    return {
        "base": {"kind": "download", "model": "builtin/qwen3-1m"},
        "problems": {"kind": "download", "dataset": "builtin/addition"},
        "tuned": train_stage(**fields),
    }


def test_the_world_is_the_product_of_all_degrees_but_those_of_experts():
    layout = Layout(dp_replicate=2, dp_shard=3, tp=4, pp=5, vpp=2, cp=2, ep=6, etp=2)
    assert layout.world_size == 2 * 3 * 4 * 5 * 2
    assert layout.data_parallel_size == 6


def test_a_recipe_whose_only_problems_are_of_layouts_raises_a_layout_error():
    with pytest.raises(LayoutError, match=r"stages\.tuned: layout: vpp 2 .* pp is 1; raise pp or remove vpp"):
        load_stages("small", Path("/"), recipe(engine="megatron", layout={"vpp": 2}))


def test_all_layout_problems_of_a_stage_are_reported_at_once():
    layout = {"vpp": 2, "cp": 3, "compile": True}
    with pytest.raises(LayoutError) as raised:
        load_stages("small", Path("/"), recipe(engine="megatron", layout=layout))
    assert all(part in str(raised.value) for part in ("vpp 2", "2 × cp 3 = 6", "compile true"))


def test_a_recipe_with_other_problems_too_raises_a_plain_recipe_error():
    stages = recipe(engine="megatron", layout={"vpp": 2})
    stages["base"]["model"] = 3
    with pytest.raises(RecipeError) as raised:
        load_stages("small", Path("/"), stages)
    assert not isinstance(raised.value, LayoutError)
    assert "vpp 2" in str(raised.value)


def test_the_other_engines_fields_are_refused():
    with pytest.raises(ValidationError, match="pp 2 only means something with `engine: megatron`"):
        make_config(layout={"pp": 2, "micro_batch_size": 2})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"mtp_loss_weight": 0.1}, "`mtp_loss_weight`"),
        ({"precision": "fp8"}, "`precision: fp8`"),
        ({"method": "reward"}, "`method: reward`"),
        ({"layout": {"dp_shard": 2, "ep": 2, "compile": True}}, "`layout.compile`"),
        ({"layout": {"tp": 2}, "adapter": {"base_precision": "nf4"}}, "`adapter.base_precision: nf4`"),
    ],
)
def test_what_shared_tokens_or_matrices_have_not_been_tried_with_is_refused_by_name(fields, named):
    layout = {"layout": {"cp": 2, "micro_batch_size": 2}}
    with pytest.raises(
        ValidationError, match=rf"`layout.(cp|tp|ep): 2` with `engine: fsdp` does not go with {named}; set"
    ):
        make_config(**{**layout, **fields})


def test_pictures_are_refused_where_tokens_are_shared():
    problem, nearest = media_errors(make_config(layout={"cp": 2, "micro_batch_size": 2}))
    assert problem == "`layout.cp: 2` with `engine: fsdp` does not go with data with media"
    assert nearest == "set `dp_shard: 2` and `cp: 1`, the nearest layout that works"
    layout = {"tp": 2, "sequence_parallel": True, "micro_batch_size": 2}
    problem, nearest = media_errors(make_config(layout=layout))
    assert problem.startswith("`layout.sequence_parallel` with `engine: fsdp` does not go with data with media")
    assert nearest == "set `sequence_parallel: false`, the nearest layout that works"


def test_adapters_of_spread_experts_are_refused_before_a_start_by_name():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    base = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 16, **sizes, **experts}
    model = ModelAtHand("here", base, None)
    layout = {"dp_shard": 2, "ep": 2, "micro_batch_size": 1}
    for targets, number in (("all-linear", 1), (["q_proj", "v_proj"], 0)):
        config = make_config(layout=layout, adapter={"rank": 4, "target_modules": targets})
        errors = [str(one) for field, one in model_findings(config, lambda: model, None) if field == "layout"]
        assert len(errors) == number
        assert all("ep: 2` with `engine: fsdp` does not go with `adapter` on experts" in one for one in errors)
        assert all("which `adapter.exclude_modules` leaves out; set `ep: 1`, the nearest" in one for one in errors)


def test_checkpoints_outlive_engine_and_layout_but_nothing_else():
    config = make_config()
    other = make_config(engine="megatron", layout={"tp": 2, "pp": 2, "micro_batch_size": 1})
    assert config.identity() != other.identity()
    assert config.resume_identity() == other.resume_identity()
    assert config.resume_identity() != make_config(learning_rate=2e-3).resume_identity()
