"""A plan warns if training rows were never checked for the questions of the benchmark that scores the model."""

import json

import pytest

from flows.planning.contamination import contamination_warnings
from flows.planning.plan import plan
from flows.recipe.recipe import load_stages
from flows.store.record import UpstreamEntry
from stages.__main__ import run_stage
from stages.core.contract import StageInput
from tests.unit.flows.conftest import TREE

SCORES = {"kind": "evaluate", "model": "small", "serving": {}, "tasks": ["one", "two"], "task_folder": "tasks"}
ONE = {"tasks": ["one"], "task_folder": "tasks"}
ODD_NAMES = {"a.b": ONE, "a": ONE, "a/b c": ONE, "": ONE, "ä": ONE}
OTHER = {"kind": "download", "dataset": "builtin/addition-preferences"}


def stages(learned_from, *others, **curations):
    """Return a recipe that trains on datasets, quantizes to 4 bits, evaluates; `curations` clean datasets."""
    data = (
        {"datasets": [{"dataset": name} for name in (learned_from, *others)]} if others else {"dataset": learned_from}
    )
    sft = {**TREE["sft"], "data": data}
    return {**TREE, "sft": sft, "other": OTHER, "small": TREE["awq"], "scores": SCORES, **curations}


def curated(*datasets, **fields):
    return {"kind": "curate", "datasets": list(datasets), **fields}


@pytest.fixture
def warnings(tmp_path, store, build):
    """Provide a function: plan → contamination warnings of the stage `scores`, whose inputs are in the store."""

    def ask(tree, hashes=None):
        tree = {name: config for name, config in tree.items() if name != "awq"}
        recipe = load_stages("mine", tmp_path, json.loads(json.dumps(tree)))
        outside = {
            name: {path: (hashes or {}).get(name, "f") * 64 for path in config.outside_paths()}
            for name, config in recipe.stages.items()
        }
        planned = plan(recipe, outside, store.index())
        built = build(planned)
        entries = {
            field: UpstreamEntry(stage=name, kind=one.record.kind, version=one.record.version, digest="")
            for field, name in recipe.stages["scores"].references().items()
            for one in [built[name]]
        }
        return list(contamination_warnings(planned.stages["scores"].identity, entries, store.find))

    return ask


def test_training_rows_that_nobody_compared_are_named_with_stage_and_tasks(warnings):
    (found,) = warnings(stages("problems"))
    assert found.startswith("problems, from which sft learned, was not decontaminated against one, two: ")


@pytest.mark.parametrize(
    ("clean", "expected"),
    [
        ({"clean": curated("problems", decontaminate={})}, []),
        ({"first": curated("problems", decontaminate={}), "clean": curated("first", exact_duplicates=True)}, []),
        ({"clean": curated("problems", exact_duplicates=True)}, ["one, two"]),
        (
            {"first": curated("problems", decontaminate={}), "clean": curated("first", "other", exact_duplicates=True)},
            ["one, two"],
        ),
        (
            {
                "clean": curated(
                    "problems", decontaminate={"benchmarks": {"a": {"tasks": ["one"], "task_folder": "tasks"}}}
                )
            },
            ["two"],
        ),
        ({"clean": curated("problems", decontaminate={"benchmarks": {"a": {"tasks": ["one", "two"]}}})}, ["one, two"]),
        ({"clean": curated("problems", decontaminate={"benchmarks": ODD_NAMES})}, ["two"]),
    ],
)
def test_curated_rows_are_good_for_the_tasks_that_all_of_them_were_compared_with(warnings, clean, expected):
    found = warnings(stages("clean", **clean))
    assert [one.split("against ")[1].split(":")[0] for one in found] == expected


def test_of_a_mixture_the_part_that_nobody_compared_is_named(warnings):
    clean = curated("problems", decontaminate={})
    (found,) = warnings(stages("clean", "other", clean=clean))
    assert found.startswith("other, from which sft learned, was not decontaminated against one, two: ")
    both = stages("clean", "clean-too", **{"clean": clean, "clean-too": curated("other", decontaminate={})})
    assert warnings(both) == []


def test_what_is_streamed_counts_like_a_copy(warnings):
    streamed = {"kind": "download", "dataset": "s3://lake/crawl", "stream": True}
    (found,) = warnings(stages("crawl", crawl=streamed))
    assert found.startswith("crawl, from which sft learned, was not decontaminated against one, two: ")
    assert warnings(stages("clean", crawl=streamed, clean=curated("crawl", decontaminate={}))) == []


def test_another_content_of_the_task_folder_is_another_benchmark(warnings):
    clean = curated("problems", decontaminate={})
    assert len(warnings(stages("clean", clean=clean), {"clean": "e"})) == 1


def test_a_model_that_learned_from_nothing_here_is_not_warned_of(warnings):
    tree = stages("problems")
    assert warnings({**tree, "scores": {**SCORES, "model": "base"}}) == []


def test_a_stage_says_what_its_orchestrator_warns_of(tmp_path):
    config = {"kind": "curate", "datasets": ["mine"], "exact_duplicates": True}
    (tmp_path / "mine" / "data").mkdir(parents=True)
    (tmp_path / "mine" / "data" / "train.jsonl").write_text('{"text": "a"}\n')
    inputs, warnings = {"mine": tmp_path / "mine"}, ("look at this",)
    stage_input = StageInput(
        name="clean", kind="curate", version="0" * 12, config=config, inputs=inputs, cache=tmp_path, warnings=warnings
    )
    (tmp_path / "config.json").write_text(stage_input.model_dump_json())
    run_stage(tmp_path)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["message"] for event in events if event["event"] == "warning"] == ["look at this"]
