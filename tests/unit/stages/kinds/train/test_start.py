"""Training continues an existing LoRA adapter, or adds a second one; conflicting fields are refused early."""

import pytest

from flows.recipe.recipe import load_stages
from stages.core.errors import RecipeError
from tests.train_stage import make_config

TRAINING = {
    "kind": "train",
    "method": "sft",
    "data": {"dataset": "rows"},
    "global_batch_size": 2,
    "learning_rate": 1e-4,
}
ADAPTER = {"rank": 8, "alpha": 16, "target_modules": ["q_proj"]}


def load(tmp_path, first, second, **fields):
    stages = {
        "base": {"kind": "download", "model": "builtin/qwen3-1m"},
        "rows": {"kind": "download", "dataset": "builtin/addition"},
        "full": {**TRAINING, "model": "base"},
        "first": {**TRAINING, "model": "base", "adapter": first},
        "second": {**TRAINING, "model": "first", "adapter": second, **fields},
    }
    return load_stages("recipe", tmp_path, stages).stages["second"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ADAPTER, ADAPTER),
        (ADAPTER, {**ADAPTER, "dropout": 0.1, "loraplus_lr_ratio": 4.0}),
        ({**ADAPTER, "init": "pissa"}, {**ADAPTER, "rank": 16, "alpha": 32}),
        (ADAPTER, {"rank": 2, "stack": "merge"}),
    ],
)
def test_it_stands_on_the_base_of_the_adapter_as_well(tmp_path, first, second):
    config = load(tmp_path, first, second)
    assert config.references() == {"model": "first", "base": "base", "data.dataset": "rows"}


@pytest.mark.parametrize(
    ("first", "second", "fields", "message"),
    [
        (
            ADAPTER,
            {**ADAPTER, "rank": 4},
            {},
            "adapter.rank: is 4, but training continues the adapter of first, which has 8",
        ),
        (
            ADAPTER,
            {**ADAPTER, "alpha": 4},
            {},
            "adapter.alpha: is 4.0, but training continues the adapter of first, which has 16.0",
        ),
        (
            ADAPTER,
            {**ADAPTER, "target_modules": "all-linear"},
            {},
            "adapter.target_modules: is all-linear, but training continues the adapter of first",
        ),
        (
            ADAPTER,
            {**ADAPTER, "use_dora": True},
            {},
            "adapter.use_dora: is True, but training continues the adapter of first",
        ),
        (
            {**ADAPTER, "init": "pissa"},
            ADAPTER,
            {},
            "adapter.rank: is 8, but training continues the adapter of first, which has 16",
        ),
        (
            ADAPTER,
            {**ADAPTER, "init": "pissa"},
            {},
            "adapter.init: is pissa, but training continues the adapter of first",
        ),
        (ADAPTER, None, {}, "adapter: missing, and first makes an adapter"),
        (
            ADAPTER,
            {**ADAPTER, "stack": "merge"},
            {"engine": "megatron"},
            '`adapter.stack: "merge"` needs `engine: fsdp`',
        ),
        (ADAPTER, ADAPTER, {"base": "full"}, "base: is full, but the base of first is base"),
        (ADAPTER, ADAPTER, {"model": "full", "base": "base"}, "base: is base, but full is no adapter"),
        (ADAPTER, {**ADAPTER, "stack": "merge"}, {"model": "full"}, "adapter.stack: full is no adapter"),
        ({**ADAPTER, "use_dora": True}, {"stack": "merge"}, {}, "adapter.stack: an adapter with `use_dora`"),
    ],
)
def test_what_does_not_go_together_is_a_problem_of_the_recipe(tmp_path, first, second, fields, message):
    with pytest.raises(RecipeError, match=message):
        load(tmp_path, first, second, **fields)


def test_either_engine_goes_on_with_it(tmp_path):
    assert load(tmp_path, ADAPTER, ADAPTER, engine="megatron").base == "base"


def test_its_chat_template_is_gone_on_with_unless_the_recipe_names_one(tmp_path):
    own, config = tmp_path / "adapter" / "chat_template.jinja", make_config()
    assert config.data_from(tmp_path) is config.data
    own.parent.mkdir()
    own.write_text("")
    assert config.data_from(tmp_path).chat_template == own
    named = config.data.model_copy(update={"chat_template": tmp_path / "named.jinja"})
    assert config.model_copy(update={"data": named}).data_from(tmp_path) is named
