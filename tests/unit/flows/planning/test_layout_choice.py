"""`layout: auto` becomes the fastest parallel layout that fits, with the artifact version of that layout."""

import json

import pytest

from flows.planning.layout_choice import MUCH_FASTER, choose_layouts
from flows.planning.model_shape import ModelConfigs, download_of
from stages.core.errors import LayoutError, RecipeError, TransientError
from stages.hubs.builtin.hub import BUILTINS
from stages.models.facts import ModelFacts
from stages.parallel.layout import AutoLayout, describe_layout

OUTSIDE = {"base": {"revision": "2"}, "problems": {"revision": "1"}, "sft": {}, "awq": {}}


@pytest.fixture(autouse=True)
def _no_hardware_file(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    monkeypatch.delenv("LIFECYCLE_HARDWARE", raising=False)


def choose(recipe, store):
    return choose_layouts(recipe, OUTSIDE, ModelConfigs(recipe, OUTSIDE, store.index()))


def test_auto_becomes_the_fastest_layout_that_fits(recipe, store):
    chosen, (choice,) = choose(recipe(sft={"layout": "auto", "precision": "fp32"}), store)
    best = choice.candidates[0]
    assert chosen.stages["sft"].layout == best.layout
    assert best.fits
    times_s = [one.time.step_time_s for one in choice.candidates]
    assert times_s == sorted(times_s)
    assert str(choice).startswith(f"sft: layout auto → {describe_layout('fsdp', best.layout)} (")


def test_a_much_faster_engine_is_named_and_a_slower_one_is_not(recipe, store):
    choices = {}
    for engine in ("fsdp", "megatron"):
        _, (choices[engine],) = choose(recipe(sft={"layout": "auto", "engine": engine, "precision": "fp32"}), store)
    faster, slower = sorted(choices.values(), key=lambda choice: choice.candidates[0].time.step_time_s)
    best = faster.candidates[0]
    assert best.time.step_time_s < MUCH_FASTER * slower.candidates[0].time.step_time_s
    assert slower.other_engine == best
    assert f"faster with another `engine`: {best.text} (" in str(slower)
    assert faster.other_engine is None
    assert "another" not in str(faster)


def test_the_config_of_a_model_here_is_read_while_its_weights_are_still_being_hashed(recipe, store, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(BUILTINS["qwen3-1m"].sizes))
    outside = {**OUTSIDE, "base": {}}
    here = recipe(base={"model": f"file://{tmp_path / 'model'}"})
    shape = ModelConfigs(here, outside, store.index(), 0.5).shape_of("base")
    assert shape == ModelFacts(BUILTINS["qwen3-1m"].sizes).shape
    elsewhere = recipe(base={"model": "hf://org/name"})
    with pytest.raises(TransientError, match=r"cannot read the config\.json of hf://org/name yet: its hub has not ans"):
        ModelConfigs(elsewhere, outside, store.index(), 0.5).shape_of("base")


def test_the_version_is_that_of_the_chosen_layout(recipe, store, make_plan):
    chosen, (choice,) = choose(recipe(sft={"layout": "auto"}), store)
    layout = choice.candidates[0].layout.model_dump(mode="json", exclude_defaults=True)
    explicit = recipe(sft={"layout": layout})
    assert make_plan(chosen).stages["sft"].version == make_plan(explicit).stages["sft"].version


def test_the_number_of_processes_is_the_recipe_s_when_it_says_one(recipe, store):
    chosen, _ = choose(recipe(sft={"layout": "auto", "execution": {"processes": 4}}), store)
    assert chosen.stages["sft"].layout.world_size == 4


def test_a_recipe_without_auto_stays_as_it_is(recipe, store):
    given = recipe()
    assert choose(given, store) == (given, [])


def test_that_no_layout_is_legal_is_an_error(recipe, store):
    with pytest.raises(LayoutError, match="no layout of 3 processes"):
        choose(recipe(sft={"layout": "auto", "global_batch_size": 8, "execution": {"processes": 3}}), store)


@pytest.mark.parametrize(
    "fields",
    [
        {"adapter": {"base_precision": "nf4"}},
        {"adapter": {"init": "eva"}},
        {"optimizer": {"bf16_stochastic_round": True}},
        {"optimizer": {"exp_avg_dtype": "bf16"}},
        {"optimizer": {"name": "muon"}},
        {"data": {"dataset": "problems", "packing": False}},
        {"precision": "fp8"},
        {},
    ],
    ids=str,
)
def test_what_auto_becomes_goes_with_the_rest_of_the_recipe(recipe, store, fields):
    """A layout under which the stage would be refused at its start is none."""
    for processes in (2, 8):
        sft = {"layout": "auto", "global_batch_size": 8, "execution": {"processes": processes}, **fields}
        _, (choice,) = choose(recipe(sft=sft, awq={"model": "base"}), store)
        for one in choice.candidates:
            if one.engine == "fsdp":
                recipe(sft={**sft, "layout": one.layout.model_dump(mode="json")}, awq={"model": "base"})


def test_another_word_than_auto_is_explained(recipe):
    with pytest.raises(RecipeError, match="expected auto, or degrees"):
        recipe(sft={"layout": "autos"})


def test_auto_is_in_the_schema():
    from flows.recipe.recipe import json_schema

    layout = json_schema()["$defs"]["TrainConfig"]["properties"]["layout"]
    assert {"const": "auto", "type": "string"} in layout["anyOf"]


def test_auto_is_no_layout_of_its_own(recipe):
    assert isinstance(recipe(sft={"layout": "auto"}).stages["sft"].layout, AutoLayout)


def test_the_shape_is_known_before_the_model_is_made(recipe, store):
    assert download_of(recipe(), "sft") == "base"
    shape = ModelConfigs(recipe(), OUTSIDE, store.index()).shape_of("base")
    assert shape == ModelFacts(BUILTINS["qwen3-1m"].sizes).shape
