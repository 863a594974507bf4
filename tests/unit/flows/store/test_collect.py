"""Re-hashing finds damaged artifacts; garbage collection never removes what is still needed."""

import json
import os
import shutil
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flows.store.collect import collect, find_garbage, needed, verify
from flows.store.record import Index

DAY_S = 86_400


def age(path, days: float) -> None:
    then_s = time.time() - days * DAY_S
    for one in (path, *path.rglob("*")):
        os.utime(one, (then_s, then_s))


def verdict_of(store, artifact):
    return next(verdict for verdict in verify(store) if verdict.artifact.folder == artifact.folder)


def test_whole_artifacts_are_whole(store, recipe, make_plan, build):
    artifacts = build(make_plan(recipe()))
    verdicts = list(verify(store))
    assert {verdict.artifact.folder for verdict in verdicts} == {artifact.folder for artifact in artifacts.values()}
    assert all(verdict.whole for verdict in verdicts)


def test_changed_missing_and_extra_files_are_named(store, recipe, make_plan, build):
    artifacts = build(make_plan(recipe()))
    content = artifacts["sft"].folder / "model" / "content"
    content.write_text("x" * content.stat().st_size)
    (artifacts["awq"].folder / "model" / "content").rename(artifacts["awq"].folder / "model" / "moved")
    assert verdict_of(store, artifacts["sft"]).damaged == ("model/content",)
    assert verdict_of(store, artifacts["awq"]).missing == ("model/content",)
    assert verdict_of(store, artifacts["awq"]).extra == ("model/moved",)
    assert verdict_of(store, artifacts["base"]).whole


def test_the_log_of_a_running_server_is_no_damage(store, recipe, make_plan, build):
    artifacts = build(make_plan(recipe()))
    (artifacts["sft"].folder / "log.txt").write_text("more and more")
    assert verdict_of(store, artifacts["sft"]).whole


def test_superseded_artifacts_go_and_the_latest_and_their_sources_stay(store, recipe, make_plan, build):
    old = build(make_plan(recipe()))
    new = build(make_plan(recipe(sft={"steps": 5})))
    garbage = find_garbage(store)
    assert {one.path for one in garbage} == {old["sft"].folder, old["awq"].folder}
    assert all(one.size_bytes > 0 for one in garbage)
    assert old["sft"].folder.exists(), "looking for garbage removes nothing"
    collect(store, garbage)
    assert {artifact.folder for artifact in store.index().artifacts} == {artifact.folder for artifact in new.values()}
    assert {planned.action for planned in make_plan(recipe(sft={"steps": 5})).stages.values()} == {"cached"}


def test_what_a_kept_artifact_was_built_from_stays_however_old(store, recipe, make_plan, build):
    old = build(make_plan(recipe()))
    build(make_plan(recipe(sft={"steps": 5}), until="sft"))
    assert find_garbage(store) == [], "the quantized model is the latest of its name and stands on the older training"
    shutil.rmtree(old["awq"].folder)
    assert {one.path for one in find_garbage(store)} == {old["sft"].folder}


def test_promoted_versions_and_their_sources_stay(store, recipe, make_plan, build):
    old = build(make_plan(recipe()))
    build(make_plan(recipe(sft={"steps": 5})))
    assert find_garbage(store, protected=[old["awq"].record.version]) == []


def test_an_old_version_that_was_just_used_again_counts_as_the_latest(store, recipe, make_plan, build):
    old = build(make_plan(recipe()))
    new = build(make_plan(recipe(sft={"steps": 5})))
    for artifact in new.values():
        os.utime(artifact.folder / "record.json", (1, 1))
    for artifact in old.values():
        store.note_use(artifact)
    assert {one.path for one in find_garbage(store)} == {new["sft"].folder, new["awq"].folder}


def test_what_was_used_since_it_was_found_stays(store, recipe, make_plan, build):
    old = build(make_plan(recipe()))
    build(make_plan(recipe(sft={"steps": 5})))
    garbage = find_garbage(store)
    time.sleep(0.01)
    store.note_use(old["sft"])
    assert [one.path for one in collect(store, garbage).removed] == [old["awq"].folder]


def test_old_work_cache_entries_and_leftovers_go_but_not_where_somebody_works(store, recipe, make_plan, build):
    artifacts = build(make_plan(recipe()))
    abandoned = store.make_folder(store.work_folder("train", "sft", "a" * 12))
    locked = store.make_folder(store.work_folder("train", "sft", "b" * 12))
    young = store.make_folder(store.work_folder("train", "sft", "c" * 12))
    cache = store.make_folder(store.cache_folder("train") / "tokens" / "0123")
    (cache / "rows").write_text("x" * 100)
    (artifacts["awq"].folder / "record.json").unlink()
    for folder in (abandoned, locked, cache, artifacts["awq"].folder):
        age(folder, days=8)
    with store.lock("train", "b" * 12, lambda: None):
        found = find_garbage(store)
        assert {one.path for one in found} == {abandoned, cache, artifacts["awq"].folder}
        assert next(one for one in found if one.path == cache).size_bytes == 100
        collect(store, found)
    assert not abandoned.exists()
    assert young.exists()


def test_what_unfinished_work_builds_on_stays(store, recipe, make_plan, build):
    old = build(make_plan(recipe()))
    build(make_plan(recipe(sft={"steps": 5})))
    shutil.rmtree(old["awq"].folder)
    assert [one.path for one in find_garbage(store)] == [old["sft"].folder]
    work = store.make_folder(store.work_folder("quantize", "awq", "a" * 12))
    stage_input = {"name": "awq", "kind": "quantize", "version": "a" * 12, "config": {}, "cache": "/", "inputs": {}}
    stage_input["inputs"] = {"sft": str(old["sft"].folder)}
    (work / "config.json").write_text(json.dumps(stage_input))
    assert find_garbage(store) == []


@pytest.fixture
def many(store, recipe, make_plan, build) -> Index:
    for steps in range(1, 5):
        build(make_plan(recipe(sft={"steps": steps})))
        build(make_plan(recipe(sft={"steps": steps}, awq={"group_size": 32})))
    return store.index()


@settings(suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_whatever_is_kept_all_that_it_was_built_from_is_kept(many, data):
    protected = data.draw(st.lists(st.sampled_from([one.record.version for one in many.artifacts])))
    kept = needed(many, protected, ())
    versions = {(one.record.kind, one.record.version) for one in kept}
    assert set(protected) <= {version for _, version in versions}
    assert all((entry.kind, entry.version) in versions for one in kept for entry in one.record.upstream.values())
