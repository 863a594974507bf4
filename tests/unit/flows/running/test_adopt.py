"""`lifecycle adopt` makes the same artifact of local files as a download stage does."""

import json

import pytest
from click.testing import CliRunner

from flows.cli.main import cli
from flows.planning.model_shape import download_of
from flows.planning.outside import resolve_outside
from flows.planning.plan import plan
from flows.planning.stored import find_stored
from flows.recipe.recipe import load_stages
from flows.running.adopt import adopt
from flows.store.collect import needed
from flows.store.record import Index
from stages.core.errors import DataError, DownloadError, RecipeError, StoreError
from tests.mergeable import make_adapter, make_base

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
TRAINING = {
    "kind": "train",
    "method": "sft",
    "data": {"dataset": "rows"},
    "global_batch_size": 8,
    "learning_rate": 1e-4,
    "steps": 2,
}


class Silent:
    def waiting(self): ...
    def started(self, attempt): ...
    def tick(self): ...
    def ended(self, outcome): ...


@pytest.fixture
def rows(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def test_a_recipe_that_names_the_same_files_finds_them_cached(store, rows, tmp_path):
    built = adopt(store, rows, "dataset", "mine", Silent())
    assert (built.artifact / "data" / "train.jsonl").read_bytes() == (rows / "train.jsonl").read_bytes()
    recipe = load_stages("other", tmp_path, {"problems": {"kind": "download", "dataset": "file://rows"}})
    assert plan(recipe, resolve_outside(recipe), store.index()).stages["problems"].action == "cached"
    (rows / "train.jsonl").write_text("{}\n")
    assert plan(recipe, resolve_outside(recipe), store.index()).stages["problems"].action == "run"


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda rows: (rows / "link.jsonl").symlink_to("/etc/passwd"), DownloadError),
        (lambda rows: (rows / "train.jsonl").rename(rows / "train.bin"), DataError),
        (lambda rows: (rows / "train.jsonl").unlink(), DownloadError),
    ],
)
def test_what_is_unsafe_or_no_dataset_is_refused(store, rows, spoil, error):
    spoil(rows)
    with pytest.raises(error):
        adopt(store, rows, "dataset", "mine", Silent())
    assert store.index().artifacts == ()


def test_a_name_that_leads_elsewhere_is_refused(store, rows):
    with pytest.raises(RecipeError, match="the name of a stage consists of"):
        adopt(store, rows, "dataset", "../mine", Silent())


def test_what_lies_in_the_store_is_not_adopted(store):
    store.make_folder(store.root / "train")
    with pytest.raises(StoreError, match="lies in the store already"):
        adopt(store, store.root / "train", "dataset", "mine", Silent())


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Provide the folder of a model, and of an adapter for it as PEFT writes it."""
    folder = tmp_path_factory.mktemp("elsewhere")
    make_base(folder / "base", **SIZES)
    make_adapter(folder / "base", 0, "all-linear").save_pretrained(folder / "tuned")
    return folder


def test_an_adapter_is_adopted_with_its_base_and_goes_into_every_stage_that_takes_one(store, elsewhere, tmp_path):
    base = adopt(store, elsewhere / "base" / "model", "model", "base", Silent())
    its_base = store.find(base.kind, base.version)
    mine = adopt(store, elsewhere / "tuned", "adapter", "mine", Silent(), its_base)
    assert mine.record.product == "adapter"
    assert store.index().base_of(mine.record).version == base.version
    needed_by_it = needed(Index((its_base, store.find(mine.kind, mine.version))), [], [])
    assert its_base in needed_by_it, "collecting keeps the base of an adapter that is kept"

    tree = {
        "base": {"kind": "download", "model": f"file://{elsewhere}/base/model"},
        "mine": {"kind": "download", "adapter": f"file://{elsewhere}/tuned", "base": "base"},
        "rows": {"kind": "download", "dataset": "builtin/addition"},
        "merged": {"kind": "merge", "model": "base", "adapter": "mine"},
        "served": {"kind": "serve", "model": "mine"},
        "scores": {"kind": "evaluate", "model": "mine", "tasks": ["addition"]},
        "on": {**TRAINING, "model": "mine", "adapter": {"rank": 4}},
        "promoted": {
            **{"kind": "promote", "name": "helper", "model": "mine", "evaluations": ["scores"], "server": "served"},
            "gates": {"max_abs_logprob_difference": 0.01},
        },
    }
    recipe = load_stages("other", tmp_path, tree)
    planned = plan(recipe, {**{name: {} for name in tree}, **resolve_outside(recipe, ["base", "mine"])}, store.index())
    assert (planned.stages["base"].action, planned.stages["mine"].action) == ("cached", "cached")
    assert {name: planned.base_of(name) for name in ("mine", "on", "merged")} == {
        "mine": "base",
        "on": "base",
        "merged": None,
    }
    assert {name: recipe.stages[name].references()["base"] for name in ("served", "scores", "on")} == dict.fromkeys(
        ("served", "scores", "on"), "base"
    )
    assert download_of(recipe, "on") == "base"

    named = load_stages("other", tmp_path, {**tree, "mine": {**tree["mine"], "adapter": "adopted:mine"}})
    found, _ = find_stored(named, ["mine"], store.index())
    assert found.stages["mine"].adapter == f"file://{mine.artifact}/adapter"


def test_an_adapter_needs_a_model_as_its_base(store, rows, elsewhere):
    data = adopt(store, rows, "dataset", "rows", Silent())
    with pytest.raises(RecipeError, match=r"its base rows-\w+ is a dataset; expected a model of another name"):
        adopt(store, elsewhere / "tuned", "adapter", "mine", Silent(), store.find(data.kind, data.version))
    for arguments in (["--kind", "adapter"], ["--kind", "model", "--base", "rows"]):
        done = CliRunner().invoke(cli, ["adopt", str(elsewhere / "tuned"), "--name", "mine", *arguments])
        assert isinstance(done.exception, RecipeError)
        assert "--base names the model of an adapter" in str(done.exception)
