"""A recipe may name a stored artifact as source: by its stage, by its adopted name, or as a champion."""

import json
import os

import pytest

from flows.champion.registrations import Registration
from flows.champion.registry import Registry
from flows.planning.outside import resolve_outside
from flows.planning.plan import plan
from flows.planning.stored import find_stored
from flows.recipe.recipe import load_stages
from flows.running.adopt import adopt
from stages.core.errors import RecipeError, ServerError, StoreError
from tests.promotion import own_mlflow
from tests.unit.flows.running.test_adopt import Silent


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where MLflow would write
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def find(tmp_path, store):
    """Provide a function that looks up a `store://` source; returns the artifact's folder and the plan's remarks."""

    def run(source, product="model"):
        recipe = load_stages("next", tmp_path, {"base": {"kind": "download", product: source}})
        found, notes = find_stored(recipe, ["base"], store.index())
        return getattr(found.stages["base"], product), notes

    return run


def test_an_artifact_is_named_by_its_stage_with_its_version_or_without(find, recipe, make_plan, build):
    old = build(make_plan(recipe()))["sft"]
    new = build(make_plan(recipe(sft={"seed": 7})))["sft"]
    assert find("store://sft")[0] == f"file://{new.folder}/model"
    assert find(f"store://{old.folder.name}")[0] == f"file://{old.folder}/model"
    (note,) = find("store://sft")[1]
    assert note == f"base: store://sft is {new.folder.name}, built {new.record.finished:%Y-%m-%d %H:%M}"


@pytest.mark.parametrize(
    ("source", "product", "expected"),
    [
        ("store://sfd", "model", r"stages\.base\.model: looking for store://sfd: .* no such model; did you mean `sft`"),
        ("store://sft", "dataset", r"stages\.base\.dataset: .* no such dataset; did you mean|; there are: problems"),
        ("adopted:sft", "model", r"looking for adopted:sft: the store has no such model$"),
    ],
)
def test_what_the_store_lacks_is_told_with_what_may_be_meant(find, recipe, make_plan, build, source, product, expected):
    build(make_plan(recipe()))
    with pytest.raises(RecipeError, match=expected):
        find(source, product)


@pytest.mark.parametrize(
    "source", ["store://", "store://../x", "adopted:", "models:/adder", "models:/a@b@c", "models:/@c"]
)
def test_a_source_that_names_nothing_is_refused_when_the_recipe_is_read(find, source):
    with pytest.raises(RecipeError, match=r"store://STAGE\[-VERSION\], adopted:NAME, models:/NAME@ALIAS"):
        find(source)


def test_a_dataset_is_no_registered_model(find):
    with pytest.raises(RecipeError, match=r"no registered dataset; write (?!.*models:/)"):
        find("models:/adder@champion", "dataset")


def test_what_was_adopted_is_cached_and_another_of_its_name_takes_its_place(find, store, tmp_path):
    rows = tmp_path / "rows"
    rows.mkdir()
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    built = []
    for number in (1, 2):
        (rows / "train.jsonl").write_text((json.dumps(row) + "\n") * number)
        built.append(adopt(store, rows, "dataset", "mine", Silent()))
        recipe = load_stages("next", tmp_path, {"base": {"kind": "download", "dataset": "adopted:mine"}})
        recipe, _ = find_stored(recipe, ["base"], store.index())
        stage = plan(recipe, resolve_outside(recipe), store.index()).stages["base"]
        assert (stage.action, stage.version) == ("cached", built[-1].version)
    assert built[0].version != built[1].version


def test_the_champion_is_asked_of_mlflow(find, recipe, make_plan, build, tmp_path, monkeypatch):
    with pytest.raises(ServerError, match=r"^stages\.base\.model: asking for models:/adder@champion: .*lifecycle up"):
        find("models:/adder@champion")
    awq = build(make_plan(recipe()))["awq"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own_mlflow(tmp_path)["MLFLOW_TRACKING_URI"])
    before = dict(os.environ)
    registry = Registry()
    candidate = registry.register(
        Registration(name="adder", model=f"quantize/{awq.record.version}", digest=awq.record.digest, evaluations=())
    )
    registry.promote(candidate, None)
    assert find("models:/adder@champion")[0] == f"file://{awq.folder}/model"
    with pytest.raises(
        StoreError, match=r"^stages\.base\.model: asking for models:/adder@old: MLflow's registry has no old of adder"
    ):
        find("models:/adder@old")
    for name in os.environ.keys() - before.keys():
        monkeypatch.delenv(name)
