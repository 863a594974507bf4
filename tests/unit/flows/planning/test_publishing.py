"""A token without which a publication would fail at its end is asked for when the refresh is planned."""

import pytest

from flows.planning.plan import plan
from flows.planning.publishing import check_publishing
from flows.recipe.recipe import load_stages
from flows.store.record import Index
from stages.core.errors import RecipeError
from tests.published import recipe_tree


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)


def planned(tmp_path, to="hf://owner/adder", **publish):
    recipe = load_stages("tiny", tmp_path, recipe_tree(to, **publish))
    return plan(recipe, {name: {} for name in recipe.stages}, Index(()))


def test_a_hub_without_its_token_is_refused_by_name(tmp_path):
    with pytest.raises(RecipeError, match=r"stages\.publish\.to: hf://owner/adder .* has no HF_TOKEN; set it"):
        check_publishing(planned(tmp_path))


@pytest.mark.parametrize(
    "fields",
    [
        {"dry_run": True},
        {"to": "file:///srv/models/adder"},
        {"execution": {"launcher": "kubernetes", "kubernetes": {"image": "pipeline"}}},
    ],
)
def test_what_needs_no_token_here_is_planned(tmp_path, fields):
    check_publishing(planned(tmp_path, **fields))


def test_with_the_token_it_is_planned(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    check_publishing(planned(tmp_path))


@pytest.mark.parametrize("to", ["hf://owner", "hf://owner/name/more", "s4://bucket/x", "owner/name", "file://"])
def test_an_address_that_is_none_is_refused_with_what_is_allowed(tmp_path, to):
    with pytest.raises(RecipeError, match=r"stages\.publish\.to: .*is no place to publish to; write hf://owner/name"):
        planned(tmp_path, to=to)


def test_private_of_what_is_no_hub_does_nothing(tmp_path):
    config = planned(tmp_path, to="file:///srv/models/adder", private=False).stages["publish"].config
    assert dict(config.idle_fields())["private"].startswith("who may read file:///srv/models/adder")
