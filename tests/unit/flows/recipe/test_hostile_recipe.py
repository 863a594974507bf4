"""Recipes are read as data: nothing in one is executed, grows without bounds, or is exposed to others."""

import pytest

from flows.recipe.recipe import load_recipe
from stages.core.errors import RecipeError

RECIPE = "name: small\nstages:\n  base: {kind: download, model: builtin/qwen3-1m}\n"


def load(tmp_path, text, *overrides):
    path = tmp_path / "small.yaml"
    path.write_text(text)
    return load_recipe(path, overrides)


def test_aliases_that_would_grow_to_billions_of_values_are_refused_at_once(tmp_path):
    levels = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 11)]
    with pytest.raises(RecipeError, match=r"aliases .* stand for 23,456,790,128 values, more than 20,000"):
        load(tmp_path, "\n".join(["a0: &a0 [1]", *levels, RECIPE]))


def test_an_alias_that_holds_itself_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="not a tree of YAML values"):
        load(tmp_path, f"loop: &loop [*loop]\n{RECIPE}")


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system ['touch ran']", "!!python/name:os.system", "!own x"])
def test_a_tag_that_would_run_code_is_refused(tmp_path, monkeypatch, tag):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match="not valid YAML: could not determine a constructor"):
        load(tmp_path, f"{RECIPE}more: {tag}\n")
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_too_large_to_be_a_recipe_is_not_read(tmp_path):
    with pytest.raises(RecipeError, match="larger than 1,048,576 bytes"):
        load(tmp_path, RECIPE + "#" * (1 << 20))


def test_a_secret_on_the_command_line_is_refused_and_not_repeated(tmp_path):
    with pytest.raises(RecipeError, match="can be seen by everyone") as caught:
        load(tmp_path, RECIPE, "stages.base.execution.environment.HF_TOKEN=hf_of_mine")
    assert "hf_of_mine" not in str(caught.value)
