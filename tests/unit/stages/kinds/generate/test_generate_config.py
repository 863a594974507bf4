"""Contradictions in a generate stage's config are refused before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from flows.planning.plan import plan
from flows.recipe.recipe import Recipe, load_recipe
from flows.running.parameters import check_parameters
from flows.running.request import RefreshRequest
from flows.store.record import Index
from stages.core.contract import StageInput
from stages.core.errors import RecipeError
from stages.kinds.generate.check import check
from tests.serving import make_model

QUICK = {
    "base": {"kind": "download", "model": "builtin/qwen3-1m"},
    "problems": {"kind": "download", "dataset": "builtin/addition"},
    "answers": {
        "kind": "generate",
        "model": "base",
        "prompts": {"dataset": "problems"},
        "num_samples": 2,
        "rewards": {"own": {"type": "python", "file": "mine/score.py"}},
    },
}


def load(folder: Path, **changed: Any) -> Recipe:
    stages = {**QUICK, "answers": {**QUICK["answers"], **changed}}
    (folder / "recipe.yaml").write_text(json.dumps({"stages": stages}))
    return load_recipe(folder / "recipe.yaml")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"rewards": {}, "keep": "best"}, "`keep: best` needs `rewards`"),
        ({"rewards": {}, "keep": {"above": 1}}, "needs `rewards` to choose by"),
        ({"num_samples": 1, "keep": "pairs"}, "raise `num_samples`, which is 1"),
        ({"temperature": 0}, "2 completions of a prompt would all be the same"),
        ({"stop": ["\n"] * 65}, "at most 64 items"),
        ({"stop": [""]}, "at least 1 character"),
        ({"min_gap": 0.5}, "`min_gap` is of `keep: pairs` alone"),
        ({"keep": {"below": 1}}, "keep.below: unknown field"),
        ({"rewards": {"a b": {"type": "format"}}}, "a b"),
        ({"rewards": {"own": {"type": "exact"}}}, "rewards.own.type: found `exact`; did you mean `exact_match`"),
        ({"rewards": {"own": {"weight": 2}}}, "rewards.own.type: missing"),
        (
            {"rewards": {"own": {"type": "number", "tolerence": 1}}},
            "rewards.own.tolerence: unknown field (value 1); did you",
        ),
        ({"max_tokens": 64, "serving": {"max_model_len": 64}}, "leaves no room for a prompt in serving.max_model_len"),
        ({"model": "problems"}, "refers to problems, which produces a dataset"),
        ({"adapter": "base"}, "adapter"),
    ],
)
def test_what_cannot_be_meant(tmp_path: Path, changed: dict[str, Any], expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, **changed)
    assert expected in str(caught.value)


def test_a_file_of_rewards_is_found_beside_the_recipe_and_counts_by_its_content(tmp_path: Path) -> None:
    recipe = load(tmp_path)
    config = recipe.stages["answers"]
    assert config.outside_paths() == {"rewards.own.file": tmp_path / "mine" / "score.py"}
    assert config.custom_code() == (f"rewards.own: {tmp_path / 'mine' / 'score.py'}: score",)

    def version(content: str) -> str:
        outside = {**{name: {} for name in recipe.stages}, "answers": {"rewards.own.file": content * 64}}
        return plan(recipe, outside, Index(())).stages["answers"].version

    assert version("a") == version("a") != version("b")
    (tmp_path / "moved").mkdir()
    assert "score.py" not in json.dumps(load(tmp_path / "moved").stages["answers"].identity())


@pytest.mark.parametrize("file", ["mine/other.py", "/etc/passwd", "../score.txt"])
def test_parameters_of_a_deployment_name_no_file_of_rewards(tmp_path: Path, file: str) -> None:
    load(tmp_path)
    request = RefreshRequest(
        recipe=str(tmp_path / "recipe.yaml"), overrides=[f"stages.answers.rewards.own.file={file}"]
    )
    with pytest.raises(RecipeError, match="parameters of a deployment may not do this"):
        check_parameters(request)


@pytest.mark.parametrize("change", ["url=https://elsewhere/v1", "key_variable=HF_TOKEN"])
def test_parameters_of_a_deployment_send_no_key_elsewhere(tmp_path: Path, change: str) -> None:
    liked = {"type": "judge", "url": "http://127.0.0.1/v1", "served_model": "critic"}
    load(tmp_path, rewards={"liked": liked})
    request = RefreshRequest(recipe=str(tmp_path / "recipe.yaml"), overrides=[f"stages.answers.rewards.liked.{change}"])
    with pytest.raises(RecipeError, match="only the recipe says which server is asked, and with which key"):
        check_parameters(request)


def test_a_reward_model_is_an_input_and_no_other_model_is_one(tmp_path: Path) -> None:
    critic = {"kind": "train", "method": "reward", "model": "base", "global_batch_size": 4, "learning_rate": 1e-4}
    stages = {**QUICK, "critic": {**critic, "data": {"dataset": "problems"}}}
    stages["answers"] = {**QUICK["answers"], "rewards": {"liked": {"type": "reward_model", "model": "critic"}}}
    (tmp_path / "recipe.yaml").write_text(json.dumps({"stages": stages}))
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert recipe.stages["answers"].references()["rewards.liked.model"] == "critic"
    outside: dict[str, Any] = {name: {} for name in recipe.stages}
    before = plan(recipe, outside, Index(())).stages["answers"]
    changed = plan(recipe, {**outside, "critic": {"other": "content"}}, Index(())).stages["answers"]
    assert "critic" in before.upstream
    assert before.version != changed.version
    stages["answers"]["rewards"] = {"liked": {"type": "reward_model", "model": "base"}}
    (tmp_path / "recipe.yaml").write_text(json.dumps({"stages": stages}))
    with pytest.raises(RecipeError, match=r"rewards.liked.model: refers to base, which produces a model"):
        load_recipe(tmp_path / "recipe.yaml")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    make_model(root / "base" / "model")
    (root / "problems" / "data").mkdir(parents=True)
    return root


def problems(artifacts: Path, rows: list[Any], **changed: Any) -> dict[str, str]:
    """Return the problems that the check before training finds for a generate stage, as error by config field."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (artifacts / "problems" / "data" / "train.jsonl").write_text(text)
    config = {**QUICK["answers"], "rewards": {"right": {"type": "exact_match"}}, **changed}
    inputs = {name: artifacts / name for name in ("base", "problems")}
    stage_input = StageInput(name="answers", kind="generate", version="", config=config, inputs=inputs, cache=artifacts)
    return {field: str(error) for field, error in check(stage_input)}


def test_what_is_wrong_with_prompts_and_rewards_is_found_before_a_model_is_made(artifacts: Path) -> None:
    good = {"prompt": [{"role": "user", "content": "1 + 2?"}], "answer": 3}
    assert not problems(artifacts, [good])
    found = problems(artifacts, [good, {**good, "answer": None}, {"prompt": 5}])
    assert "2 of 3 rows are no prompts" in found["prompts"]
    assert "train.jsonl:2 has no right answer, which the reward right compares with" in found["prompts"]
    assert "train.jsonl:3" in found["prompts"]
    assert (
        "no files of the split 'test'"
        in problems(artifacts, [good], prompts={"dataset": "problems", "split": "test"})["prompts"]
    )
    assert (
        "has no place for `system`"
        in problems(artifacts, [{"prompt": "1 + 2 =", "answer": 3}], system="Be brief.", apply_chat_template=False)[
            "prompts"
        ]
    )
    number = {"right": {"type": "number"}}
    assert (
        "train.jsonl:1 has the right answer 'three', which has no number, which the reward right cannot do without"
        in problems(artifacts, [{**good, "answer": "three"}], rewards=number)["prompts"]
    )
    (artifacts / "broken.py").write_text("import nothing_like_it")
    own = {"own": {"type": "python", "file": str(artifacts / "broken.py")}}
    assert "No module named 'nothing_like_it'" in problems(artifacts, [good], rewards=own)["rewards.own"]
    game = {"python": str(artifacts / "broken.py")}
    assert "No module named 'nothing_like_it'" in problems(artifacts, [good], environment=game)["environment"]


def test_its_own_server_must_listen_on_this_machine_and_hold_what_the_model_can(tmp_path: Path) -> None:
    config = load(tmp_path, execution={"host": "203.0.113.1"}, serving={"max_model_len": 4096}).stages["answers"]
    (elsewhere,) = config.execution.problems_here()
    assert elsewhere.startswith("host: cannot listen on 203.0.113.1")
    (too_long,) = config.model_problems(lambda: {"model_type": "llama", "max_position_embeddings": 2048})
    assert too_long == "serving.max_model_len: 4096, but the model has 2048 positions; lower it"
