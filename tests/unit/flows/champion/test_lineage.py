"""Lineage of an artifact: a tree of all stages and files that it was made from, and the differences of two trees."""

import json
from datetime import timedelta

import pytest

from flows.champion.differing import ComparedSide, compare, side_of_subject
from flows.cli.lineage_commands import differences_as_text, lineage_as_text
from flows.planning.changes import with_changes
from flows.planning.outside import resolve_outside
from flows.planning.plan import plan
from flows.recipe.recipe import load_stages
from flows.report.lineage import artifact_subject, lineage_of
from flows.running.runner import run_stage
from flows.store.content import hash_path
from tests.unit.flows.conftest import commit_stage

TREE = {
    "base": {"kind": "download", "model": "builtin/qwen3-1m"},
    "rows": {"kind": "download", "dataset": "file://rows"},
    "sft": {
        "kind": "train",
        "method": "sft",
        "model": "base",
        "data": {"dataset": "rows"},
        "global_batch_size": 8,
        "learning_rate": 1e-3,
    },
    "dpo": {
        "kind": "train",
        "method": "dpo",
        "model": "sft",
        "data": {"dataset": "rows"},
        "global_batch_size": 8,
        "learning_rate": 1e-4,
    },
    "scores": {"kind": "evaluate", "model": "dpo", "tasks": ["sums"], "task_folder": "tasks"},
}
METRICS = {
    "sft": {"num_documents": 300.0, "num_tokens": 4000.0, "loss": 1.5},
    "dpo": {"num_different_pictures": 9.0, "num_different_videos": 1.0},
}


class Silent:
    def waiting(self): ...
    def started(self, attempt): ...
    def tick(self): ...
    def ended(self, outcome): ...


@pytest.fixture
def night(store, tmp_path):
    """Provide a function (rows, learning rate, score, task → a fake run's artifacts), and the input files' cache."""
    for folder in ("rows", "tasks"):
        (tmp_path / folder).mkdir()
    kept = store.cache_folder("contents")

    def refresh(files, rate, score, task="a: 1\n"):
        for name, num_rows in files.items():
            (tmp_path / "rows" / name).write_text("".join(json.dumps({"text": str(n)}) + "\n" for n in range(num_rows)))
        (tmp_path / "tasks" / "sums.yaml").write_text(task)
        recipe = load_stages("nightly", tmp_path, {**TREE, "sft": {**TREE["sft"], "learning_rate": rate}})
        found = resolve_outside(recipe, ["base", "rows"])
        tasks = {"task_folder": hash_path(tmp_path / "tasks")}
        made = plan(recipe, {"sft": {}, "dpo": {}, "scores": tasks, **found}, store.index())
        with_changes(made, store.index(), kept)
        built = {}
        for name, stage in made.stages.items():
            references = {field: built[one] for field, one in stage.config.references().items()}
            if name == "rows":
                built[name] = store.find("download", run_stage(stage, {}, store, Silent()).version)
            else:
                known = store.find(stage.kind, stage.version)
                built[name] = known or commit_stage(store, stage, references, f"{name} {rate}")
        metrics = {**METRICS, "scores": {"sums.exact_match": score, "sums.exact_match_stderr": 0.1}}
        for name, values in metrics.items():
            tags = {"media_sha256": "ab" * 32} if name == "dpo" else {}
            (built[name].folder / "result.json").write_text(json.dumps({"metrics": values, "tags": tags}))
        return built

    return refresh, kept


def side(artifact, index):
    return side_of_subject(artifact_subject(artifact.folder.name, artifact, index), index)


def test_the_tree_reaches_the_files_that_came_from_outside(night, store, tmp_path):
    refresh, _ = night
    built = refresh({"train.jsonl": 300, "test.jsonl": 20}, 1e-3, 0.5)
    found = lineage_of(artifact_subject("dpo", built["dpo"], store.index()), store.index())
    tree = found.tree
    assert [one.model_dump() for one in found.evaluations] == [
        {"stage": "scores", "version": built["scores"].record.version, "scores": {"sums.exact_match": 0.5}}
    ]
    assert set(tree.upstream) == {"model", "data.dataset"}
    sft = tree.upstream["model"]
    assert (sft.version, sft.recipe, sft.counts) == (
        built["sft"].record.version,
        "nightly",
        {"num_documents": 300, "num_tokens": 4000},
    )
    rows = sft.upstream["data.dataset"]
    assert rows.source == f"file://{tmp_path / 'rows'}"
    assert [(one.name, one.num_rows) for one in rows.files] == [("test.jsonl", 20), ("train.jsonl", 300)]
    text = lineage_as_text(found)
    assert "train.jsonl: 300 rows, sha256 " in text
    assert f"data.dataset: {rows.stage}-{rows.version} (download), as above" in text
    assert "sums.exact_match 0.5" in text


def test_the_media_that_a_training_learned_from_are_counted_and_listed(night, store):
    refresh, _ = night
    built = refresh({"train.jsonl": 3}, 1e-3, 0.5)
    subject = artifact_subject("dpo", built["dpo"], store.index())
    says = "learned from 9 pictures and 1 video, sha256 abababababab"
    assert lineage_as_text(lineage_of(subject, store.index())).count(says) == 1
    list_file = built["dpo"].folder / "media.sha256"
    list_file.write_text("".join(f"{number:064}  {number}.png\n" for number in range(10)))
    text = lineage_as_text(lineage_of(subject, store.index()))
    assert "7.png: sha256 000000000000" in text and "8.png" not in text
    assert f"… and more: {list_file} lists all" in text


def test_what_is_gone_or_was_built_again_is_said(night, store):
    refresh, _ = night
    built = refresh({"train.jsonl": 3}, 1e-3, 0.5)
    store.remove(built["base"].folder)
    record = built["rows"].record
    (built["rows"].folder / "record.json").write_text(record.model_copy(update={"digest": "0" * 64}).model_dump_json())
    found = lineage_of(artifact_subject("sft", built["sft"], store.index()), store.index())
    text = lineage_as_text(found)
    assert found.tree.upstream["model"].folder is None
    assert "no longer in the store" in text
    assert "REBUILT since with other content" in text


def test_what_differs_is_said_as_a_person_would(night, store):
    refresh, kept = night
    old = refresh({"train.jsonl": 300}, 1e-3, 0.5)
    new = refresh({"train.jsonl": 350, "more.jsonl": 7}, 5e-4, 0.625, task="a: 2\n")
    index = store.index()
    found = compare(side(old["dpo"], index), side(new["dpo"], index), kept)
    assert found.data == ("rows: more.jsonl is new (7 rows)", "rows: train.jsonl 300 → 350 rows")
    assert found.config == (
        "sft: learning_rate 0.001 → 0.0005",
        "scores: task_folder sums.yaml line 1: 'a: 1' → 'a: 2'",
    )
    assert found.scores == ("sums.exact_match 0.5 → 0.625",)
    assert (found.rebuilt, found.code, found.stages) == (("dpo",), (), ())
    assert found.same == (old["base"].folder.name,)
    text = differences_as_text(found)
    assert "built again, since what it stands on differs: dpo" in text
    assert not found.none


def test_nothing_differs_between_one_and_itself(night, store):
    refresh, kept = night
    built = refresh({"train.jsonl": 3}, 1e-3, 0.5)
    one = side(built["dpo"], store.index())
    assert compare(one, one, kept).none
    assert "nothing differs" in differences_as_text(compare(one, one, kept))


def test_code_and_stages_that_only_one_has_are_named(night, store):
    refresh, kept = night
    built = refresh({"train.jsonl": 3}, 1e-3, 0.5)
    sft = built["sft"]
    record = sft.record.model_copy(
        update={
            "version": "f" * 12,
            "identity": {**sft.record.identity, "stage_version": 99},
            "git_commit": "c" * 40,
            "packages": {"torch": "9.9"},
            "finished": sft.record.finished + timedelta(days=1),
        }
    )
    changed = type(sft)(sft.folder, record, 0.0)
    version = sft.record.identity["stage_version"]
    before = ComparedSide("a", (sft, built["dpo"]), {"sums.acc": 0.5}, unbuilt={"serve": "failed"})
    found = compare(before, ComparedSide("b", (changed,), {}), kept)
    assert found.code == (
        f"sft: how its kind computes (train {version} → 99)",
        "commit unknown → cccccccccccc (sft)",
        "torch none → 9.9",
    )
    assert found.stages == (f"{built['dpo'].folder.name} (train) is gone", "serve was not built in a: failed")
    assert found.scores == ("sums.acc 0.5 → none",)
