"""What is adopted is what a download of the same files would have made."""

import json

import pytest

from flows.planning.outside import resolve_outside
from flows.planning.plan import plan
from flows.recipe.recipe import load_stages
from flows.running.adopt import adopt
from stages.core.errors import DataError, DownloadError, RecipeError, StoreError


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
