"""Promotion gates that always pass or always fail are refused when the refresh is planned."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from flows.running.request import RefreshRequest, make_plan
from stages.core.errors import RecipeError

CONFIGS = Path(__file__).parents[4] / "configs"


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    shutil.copytree(CONFIGS / "tasks", tmp_path / "tasks")

    def run(change, **promote):
        tree = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text())
        tree["stages"]["promote"] |= promote
        change(tree["stages"])
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps(tree))
        return make_plan(RefreshRequest(str(path)))

    return run


@pytest.mark.parametrize(
    ("gates", "expected"),
    [
        ({"min_scores": {"addition.exact_mach": 0.9}}, "min_scores: no evaluation gives the score addition.exact_mach"),
        ({"max_scores": {"subtraction.exact_match": 1}}, "max_scores: no evaluation gives the score subtraction"),
        ({"min_scores": {"addition": 1}}, "the tasks are addition, and their scores are called TASK.METRIC"),
        ({"min_scores": {"addition.exact_match": 40}}, "min_scores: addition.exact_match is a share, from 0 to 1, and"),
        ({"max_scores": {"addition.exact_match": -1}}, "max_scores: addition.exact_match is a share"),
        ({"min_scores": {"addition.exact_match": 0}}, "min_scores: .* the bound is 0, which nothing misses"),
        ({"max_scores": {"addition.exact_match": 1}}, "max_scores: .* the bound is 1, which nothing misses"),
        (
            {"min_scores": {"addition.exact_match": 0.9}, "max_scores": {"addition.exact_match": 0.8}},
            "gates: addition.exact_match is to be at least 0.9 and at most 0.8, which no score is",
        ),
    ],
)
def test_scores_that_no_task_gives_and_bounds_that_nothing_meets(plan, gates, expected):
    with pytest.raises(RecipeError, match=f"stages.promote.gates.*{expected}|stages.promote.{expected}"):
        plan(lambda stages: None, gates=gates)


def test_throughput_of_a_server_that_is_not_measured(plan):
    with pytest.raises(RecipeError, match=r"promote\.gates\.min_output_tokens_per_s: serve has no `benchmark`"):
        plan(lambda stages: stages["serve"].update(benchmark=None), gates={"min_output_tokens_per_s": 1})


@pytest.mark.parametrize("baselines", [["evaluate-awq"], ["evaluate-sft", "again"]])
def test_a_baseline_that_is_the_candidate_itself(plan, baselines):
    def change(stages):
        stages["again"] = {**stages["evaluate-awq"], "limit": 5}

    with pytest.raises(RecipeError, match=r"stages\.promote\.baselines\.\d: .* evaluates awq, the candidate itself"):
        plan(change, baselines=baselines)


def test_gates_that_can_be_judged_are_taken(plan):
    plan(lambda stages: None, baselines=["evaluate-sft"], gates={"min_scores": {"addition.exact_match": 0.9}})


@pytest.mark.parametrize(("name", "value"), [("", "a"), ("A=B", "a"), ("A\0", "a"), ("A", "a\0b")])
def test_variables_that_no_process_can_have(plan, name, value):
    with pytest.raises(RecipeError, match=r"stages\.sft\.execution\.environment: .*(no name of a variable|a NUL)"):
        plan(lambda stages: stages["sft"].update(execution={"environment": {name: value}}))


@pytest.mark.parametrize(("field", "source"), [("model", "base"), ("dataset", "problems")])
def test_a_file_source_that_is_not_there_is_told_with_stage_and_field(plan, field, source):
    with pytest.raises(Exception, match=rf"^stages\.{source}\.{field}: file:///nowhere/\w+ does not exist"):
        plan(lambda stages: stages[source].update({field: f"file:///nowhere/{field}"}))
