"""A serve stage's `speculative`: refused where it cannot work, and an input if a model guesses."""

import json
from pathlib import Path

import pytest

from flows.cli.show import launch_arguments
from flows.recipe.recipe import load_recipe
from stages.core.contract import StageInput
from stages.core.errors import RecipeError
from stages.kinds.serve.__main__ import _parse, _read
from stages.kinds.serve.check import check
from stages.kinds.serve.config import ServeConfig
from stages.serving.config import ServingConfig, Speculation
from stages.serving.registry import new_launch_spec
from tests.mtp_models import save_with_mtp
from tests.serving import make_model

BASE = {"kind": "download", "model": "builtin/qwen3-1m"}


@pytest.fixture
def read(tmp_path: Path):
    def recipe(**serve):
        tree = {"stages": {"base": BASE, "small": BASE, "served": {"kind": "serve", "model": "base", **serve}}}
        (tmp_path / "recipe.yaml").write_text(json.dumps(tree))
        return load_recipe(tmp_path / "recipe.yaml")

    return recipe


def identity(**serve) -> dict:
    return ServeConfig.model_validate({"kind": "serve", "model": "base", **serve}).identity()


def test_each_way_of_guessing_is_a_version_of_its_own_and_none_is_the_one_before() -> None:
    assert "speculative" not in identity()
    ways = [identity(speculative=way) for way in ("ngram", "mtp", {"draft": "small"})]
    assert len({json.dumps(way, sort_keys=True) for way in (*ways, identity())}) == 4
    # The version of the draft model identifies it, not the name of its stage.
    assert identity(speculative={"draft": "small"}) == identity(speculative={"draft": "other"})


def test_a_draft_model_is_an_input_of_the_stage(read) -> None:
    config = read(speculative={"draft": "small"}).stages["served"]
    assert config.references() == {"model": "base", "speculative.draft": "small"}
    assert config.speculation({"small": Path("/a/small")}).draft == Path("/a/small/model")


@pytest.mark.parametrize(
    ("serve", "problem"),
    [
        ({"speculative": {"draft": "base"}}, "speculative.draft: base is the served model; name a smaller one"),
        ({"speculative": {"draft": "nowhere"}}, "nowhere"),
        ({"speculative": "eagle"}, "speculative"),
        (
            {"speculative": "ngram", "serving": {"engine": "sglang"}},
            "speculative: sglang cannot guess tokens ahead by ngram; serve with vllm, or remove it",
        ),
        (
            {"speculative": {"draft": "small"}, "serving": {"engine": "lmdeploy"}},
            "lmdeploy cannot guess tokens ahead by",
        ),
    ],
)
def test_what_cannot_guess_is_refused_when_the_recipe_is_read(read, serve: dict, problem: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(**serve)
    assert problem in str(caught.value)


def problems(tmp_path: Path, **serve) -> dict[str, str]:
    config = {"kind": "serve", "model": "m", **serve}
    inputs = {"m": tmp_path / "m", "d": tmp_path / "d"}
    stage = StageInput(name="s", kind="serve", version="0" * 12, config=config, cache=tmp_path, inputs=inputs)
    return {field: str(error) for field, error in check(stage)}


def test_mtp_needs_a_model_with_such_layers(tmp_path: Path) -> None:
    make_model(tmp_path / "m/model")
    assert "hold no layers of multi-token prediction" in problems(tmp_path, speculative="mtp")["speculative"]
    assert problems(tmp_path, speculative="ngram", benchmark={"input_tokens": 8}) == {}


@pytest.mark.parametrize("family", ["qwen3_5_text", "glm4_moe"])
def test_a_model_with_such_layers_may_guess_by_them(tmp_path: Path, family: str) -> None:
    save_with_mtp(family, tmp_path / "m/model")
    assert "speculative" not in problems(tmp_path, speculative="mtp")


def test_a_draft_model_needs_the_same_tokens(tmp_path: Path) -> None:
    make_model(tmp_path / "m/model")
    make_model(tmp_path / "d/model")
    draft = {"draft": "d"}
    assert problems(tmp_path, speculative=draft) == {}
    path = tmp_path / "d/model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 64}))
    assert problems(tmp_path, speculative=draft)["speculative.draft"].startswith(
        "d has 64 tokens, the served model 128"
    )


def test_a_draft_model_with_as_many_other_tokens_is_refused(tmp_path: Path) -> None:
    for name in "md":
        make_model(tmp_path / name / "model")
        tokens = {"a": 0, "b": 1, "c": 2} if name == "m" else {"a": 0, "b": 2, "c": 1}
        (tmp_path / name / "model/tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
    found = problems(tmp_path, speculative={"draft": "d"})["speculative.draft"]
    assert found == (
        "d has 'b' as token 2, and the served model as 1: hardly a guess would be right; expected one with the same "
        "tokens"
    )


def test_a_server_that_is_started_again_guesses_as_before(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    guessing = Speculation(method="draft", draft=tmp_path)
    spec = new_launch_spec(tmp_path / "model", "m", ServingConfig(), speculation=guessing)
    again, _ = _read(_parse(launch_arguments(spec)), False, 1)
    assert again.speculation == guessing
