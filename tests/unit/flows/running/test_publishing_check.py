"""A publish target that cannot be written to is reported right after the downloads, before any training."""

from flows.running.validation import input_of
from stages.core.errors import PublishError
from stages.kinds.publish.check import check
from tests.published import Publishing, recipe_tree


def test_the_check_gets_a_publication_whose_model_is_yet_to_be_made(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    (tmp_path / "a-file").write_text("")
    made = Publishing(tmp_path, recipe_tree(f"file://{tmp_path}/a-file/adder"))
    downloads = {name: made.built[name] for name in ("base", "rows")}
    given = input_of(made.planned, made.stages, downloads, made.store, tmp_path / "check")
    assert given
    ((field, error),) = check(given)
    assert (field, type(error)) == ("to", PublishError)
