"""A promotion evaluates the champion again, once, if its evaluation had other questions than the candidate's."""

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.champion.registrations import Registration
from flows.champion.registry import Registry
from flows.launch import local
from flows.ledger.home import store_root
from flows.running.runner import BuiltStage, run_stage
from flows.store.store import Store
from stages.kinds.promote.verdict import Verdict
from tests.candidates import write_evaluation, write_model
from tests.faults.tiny import Notes
from tests.pipeline.made_up_evaluations import RIGHT, prompt_of
from tests.promotion import NAME, candidate_tree, commit, own_mlflow, planned_stages, write_question


@pytest.fixture
def store(tmp_path, monkeypatch):
    for name, value in own_mlflow(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(local.PROGRAMS, "promote", "tests.pipeline.made_up_evaluations")
    return Store(store_root())


def promote(store: Store, mark: str, right: int, num_fewshot: int) -> tuple[BuiltStage, Notes]:
    """Promote a candidate with `right` of 100 right answers, given after `num_fewshot` examples in the prompt."""
    tree = candidate_tree(mark)
    tree["scores"]["num_fewshot"] = num_fewshot
    stages = planned_stages(store, tree)
    built = {"model": commit(store, stages["model"], {}, lambda work: write_model(work, mark))}

    def write_scores(work: Path) -> None:
        write_evaluation(work, [1.0] * right + [0.0] * (100 - right), prompt=prompt_of({"num_fewshot": num_fewshot}))
        write_question(work, stages["scores"], built)

    built["scores"] = commit(store, stages["scores"], built, write_scores)
    notes = Notes()
    return run_stage(stages["promote"], built, store, notes), notes


def evaluations_of_champions(store: Store) -> list[Path]:
    return sorted((store.root / "evaluate").glob("scores-champion-*"))


def milestones_of(built: BuiltStage) -> list[str]:
    return [json.loads(line)["message"] for line in (built.artifact / "events.jsonl").read_text().splitlines()]


def test_a_champion_that_was_asked_something_else_is_evaluated_as_the_candidate_was(store):
    promote(store, "first", 90, num_fewshot=0)
    second, _ = promote(store, "second", 70, num_fewshot=5)

    verdict = Verdict.model_validate_json((second.artifact / "verdict.json").read_bytes())
    assert (verdict.outcome, verdict.against) == ("promoted", "champion (version 1)")
    [again] = evaluations_of_champions(store)
    record = json.loads((again / "record.json").read_text())
    assert record["identity"]["config"]["num_fewshot"] == 5
    champion = Registry().find(NAME)
    assert champion and champion.number == "2"
    assert f"sums.exact_match | 100 | 0 | 0.7000 | {RIGHT / 100:.4f}" in (second.artifact / "verdict.md").read_text()
    assert any(
        "evaluated as the candidate was" in message and "differs in its prompt" in message
        for message in milestones_of(second)
    )


def test_a_registered_version_says_its_scores_and_where_it_came_from(store):
    promote(store, "first", 90, num_fewshot=0)
    version = MlflowClient().get_model_version_by_alias(NAME, "champion")
    assert version.tags["lifecycle.score.sums.exact_match"] == "0.9"
    assert "**Scores**: sums.exact_match 0.9" in version.description
    assert "`model-" in version.description


def test_a_version_that_is_registered_again_keeps_nothing_of_before_but_its_promotion(store):
    registry = Registry()
    scores = {"sums.exact_match": 0.9, "sums.f1": 0.8}
    artifacts = {"model": "train/a", "digest": "digest", "evaluations": ("evaluate/a",), "server": "serve/a"}
    first = Registration(name=NAME, **artifacts, scores=scores, data=("rows",))
    registered = registry.register(first, predecessor="7", promotion="attempt")
    MlflowClient().set_model_version_tag(NAME, registered.number, "of.somebody", "own")
    changes = {"evaluations": ("evaluate/b",), "server": None, "scores": {"sums.exact_match": 0.95}}
    again = first.model_copy(update=changes)
    assert registry.register(again).number == registered.number
    assert MlflowClient().get_model_version(NAME, registered.number).tags == {
        "lifecycle.model": "train/a",
        "lifecycle.digest": "digest",
        "lifecycle.evaluations": "evaluate/b",
        "lifecycle.data": "rows",
        "lifecycle.score.sums.exact_match": "0.95",
        "lifecycle.predecessor": "7",
        "lifecycle.promotion": "attempt",
        "of.somebody": "own",
    }


def test_it_is_asked_once_for_all_candidates_that_are_asked_the_same(store):
    promote(store, "first", 90, num_fewshot=0)
    worse, _ = promote(store, "worse", 20, num_fewshot=5)
    [again] = evaluations_of_champions(store)
    also_worse, _ = promote(store, "also worse", 30, num_fewshot=5)

    outcomes = [
        Verdict.model_validate_json((one.artifact / "verdict.json").read_bytes()).outcome for one in (worse, also_worse)
    ]
    assert outcomes == ["not promoted", "not promoted"]
    assert evaluations_of_champions(store) == [again]
    assert not any("evaluated the champion in" in message for message in milestones_of(also_worse))


def test_a_champion_that_was_asked_the_same_is_not_evaluated_again(store):
    promote(store, "first", 90, num_fewshot=5)
    promote(store, "second", 95, num_fewshot=5)

    assert evaluations_of_champions(store) == []
