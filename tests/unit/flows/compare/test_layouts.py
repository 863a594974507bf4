"""Parallel layouts written as text, such as `fsdp tp=2`, are parsed; invalid ones give an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.compare.layouts import read_layouts, text_of, without_misfits
from stages.core.errors import RecipeError
from stages.hubs.builtin.hub import BUILTINS
from stages.kinds.train.config import TrainConfig
from stages.models.facts import ModelFacts


def make_stage(**fields):
    tree = {
        "kind": "train",
        "method": "sft",
        "model": "base",
        "data": {"dataset": "problems"},
        "global_batch_size": 64,
        "learning_rate": 1e-4,
        "layout": {"micro_batch_size": 4, "recompute": "full"},
    }
    return TrainConfig.model_validate({**tree, **fields})


STAGE = make_stage()


def test_what_a_line_leaves_out_is_the_default_and_not_what_the_recipe_says():
    (config,), _ = read_layouts(["fsdp dp_shard=2"], STAGE)
    assert (config.layout.dp_shard, config.layout.micro_batch_size, config.layout.recompute) == (2, 1, "none")
    assert config.global_batch_size == STAGE.global_batch_size


def test_all_but_the_layout_is_the_stage_s_own():
    (config,), _ = read_layouts(["fsdp dp_shard=2 reshard_after_forward=false"], STAGE)
    assert config.model_copy(update={"layout": STAGE.layout}) == STAGE


def test_the_processes_are_those_of_the_line():
    (config,), _ = read_layouts(["fsdp dp_shard=8"], make_stage(execution={"processes": 1}))
    assert config.processes == 8


def test_a_line_may_name_the_batch():
    (config,), _ = read_layouts(["fsdp dp_shard=2 global_batch_size=128"], STAGE)
    assert config.global_batch_size == 128
    assert text_of(config, STAGE.global_batch_size) == "fsdp dp_shard=2 global_batch_size=128"


def test_a_file_has_a_layout_a_line(tmp_path):
    file = tmp_path / "layouts"
    file.write_text("# comment\nfsdp\n\nfsdp dp_shard=2  # two processes\n")
    configs, _ = read_layouts([str(file), "fsdp dp_shard=4"], STAGE)
    assert [config.layout.world_size for config in configs] == [1, 2, 4]


@given(
    st.fixed_dictionaries(
        {
            "dp_replicate": st.sampled_from([1, 2]),
            "dp_shard": st.sampled_from([1, 2, 4]),
            "micro_batch_size": st.sampled_from([1, 2]),
            "recompute": st.sampled_from(["none", "full"]),
            "reshard_after_forward": st.booleans(),
            "accumulate": st.sampled_from(["auto", "whole", "sharded"]),
        }
    )
)
def test_what_is_written_is_read_back(layout):
    config = make_stage(layout=layout)
    (back,), _ = read_layouts([text_of(config, STAGE.global_batch_size)], STAGE)
    assert back.layout == config.layout


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("fspd dp_shard=2", "did you mean `fsdp`?"),
        ("fsdp dp_shrad=2", "unknown key `dp_shrad`; did you mean `dp_shard`?"),
        ("fsdp dp_shard", "expected KEY=VALUE"),
        ("fsdp dp_shard=2 dp_shard=4", "`dp_shard` is said twice"),
        ("fsdp dp_shard=two", "dp_shard: found"),
        ("fsdp dp_shard=0", "dp_shard: found 0"),
        ("fsdp dp_shard=3", "64"),
        ("fsdp ep=2", "ep"),
    ],
)
def test_a_bad_line_is_explained(line, problem):
    with pytest.raises(RecipeError) as error:
        read_layouts([line], STAGE)
    assert line in str(error.value)
    assert problem in str(error.value)


def test_a_layout_that_cannot_work_does_not_keep_others_from_being_compared():
    configs, (refused,) = read_layouts(["fsdp", "fsdp dp_shard=3 micro_batch_size=2"], STAGE)
    assert len(configs) == 1
    assert (refused.text, refused.layout.world_size) == ("fsdp dp_shard=3 micro_batch_size=2", 3)
    assert "global_batch_size 64 is not divisible" in refused.reason


def test_what_the_sizes_of_the_model_do_not_allow_is_not_started():
    shape = ModelFacts(BUILTINS["qwen3-1m"].sizes).shape  # 4 heads, 2 of keys, in 4 layers
    configs, refused = read_layouts(["fsdp dp_shard=3 micro_batch_size=2", "fsdp", "tp=2", "tp=3", "pp=8"], STAGE)
    fit, unfit = without_misfits(configs, shape, refused)
    assert [text_of(config, 64) for config in fit] == ["fsdp", "fsdp tp=2"]
    assert [one.text for one in unfit] == ["fsdp tp=3", "megatron pp=8", "fsdp dp_shard=3 micro_batch_size=2"]
    assert "does not divide the model's 4 attention heads" in unfit[0].reason
    with pytest.raises(RecipeError, match=r"2 problems:\n  fsdp tp=3: .*\n  megatron pp=8: .* only 4 layers"):
        without_misfits(configs[2:], shape, [])


def test_what_a_split_does_not_go_with_is_a_row():
    configs, (refused,) = read_layouts(["fsdp", "fsdp dp_shard=2 ep=2 compile=true"], STAGE)
    assert [text_of(config, 64) for config in configs] == ["fsdp"]
    assert "does not go with `layout.compile`" in refused.reason


def test_all_bad_lines_are_told_at_once():
    with pytest.raises(RecipeError, match="3 problems"):
        read_layouts(["fsdp x=1", "fsdp", "fsdp dp_shard=3", "fspd"], STAGE)


def test_a_layout_is_not_compared_with_itself():
    with pytest.raises(RecipeError, match="2 times"):
        read_layouts(["fsdp dp_shard=2", "fsdp dp_shard=2 tp=1"], STAGE)
