"""A plan says what runs and why, in plain words."""

import sys
from pathlib import Path

import pytest

from flows.launch import hook
from flows.store.content import RECORD_FILE
from stages.core.errors import RecipeError


def actions(plan) -> dict[str, str]:
    return {name: planned.action for name, planned in plan.stages.items()}


def reasons(plan) -> dict[str, str]:
    return {name: planned.reason for name, planned in plan.stages.items()}


def test_everything_runs_in_an_empty_store(recipe, make_plan):
    plan = make_plan(recipe())
    assert set(actions(plan).values()) == {"run"}
    assert set(reasons(plan).values()) == {"first build"}


def test_what_was_built_is_cached_and_says_when(recipe, make_plan, build):
    artifacts = build(make_plan(recipe()))
    plan = make_plan(recipe())
    assert set(actions(plan).values()) == {"cached"}
    finished = artifacts["sft"].record.finished
    assert reasons(plan)["sft"] == f"built {finished:%Y-%m-%d %H:%M} UTC"


def test_a_cached_plan_reads_no_records_but_those_of_its_own_artifacts(recipe, make_plan, build):
    """A plan takes no longer after a year of nightly refreshes, which leave a thousand other artifacts."""
    build(make_plan(recipe(sft={"steps": 7})))
    artifacts = build(make_plan(recipe()))
    opened, is_listening = set(), True

    def listen(event, arguments):
        if is_listening and event == "open" and str(arguments[0]).endswith(RECORD_FILE):
            opened.add(Path(arguments[0]).parent)

    sys.addaudithook(listen)
    make_plan(recipe())
    is_listening = False
    assert opened == {artifact.folder for artifact in artifacts.values()}


def test_a_changed_field_runs_the_stage_and_what_stands_on_it(recipe, make_plan, build):
    before = make_plan(recipe())
    build(before)
    plan = make_plan(recipe(sft={"learning_rate": 2e-5}))
    assert actions(plan) == {"base": "cached", "problems": "cached", "sft": "run", "awq": "run"}
    old, new = before.stages["sft"].version, plan.stages["sft"].version
    assert reasons(plan)["sft"] == f"differs from version {old}: learning_rate 1e-5 → 2e-5"
    assert reasons(plan)["awq"].endswith(f": version of model {old} → {new}")
    assert [str(difference) for difference in plan.stages["sft"].differences] == ["learning_rate 1e-5 → 2e-5"]


def test_the_nearest_earlier_version_is_the_one_with_the_fewest_differences(recipe, make_plan, build):
    build(make_plan(recipe(sft={"steps": 5, "seed": 1, "learning_rate": 1e-3})))
    build(make_plan(recipe(sft={"steps": 7})))
    build(make_plan(recipe(sft={"steps": 5, "seed": 3, "learning_rate": 1e-2})))
    assert reasons(make_plan(recipe(sft={"steps": 8})))["sft"].endswith(": steps 7 → 8")


def test_execution_fields_run_nothing(recipe, make_plan, build):
    build(make_plan(recipe()))
    plan = make_plan(recipe(sft={"execution": {"timeout_s": 60, "retries": 0}}))
    assert set(actions(plan).values()) == {"cached"}


def test_what_stands_on_other_content_of_the_same_version_is_stale(recipe, make_plan, build):
    build(make_plan(recipe()), sft="first")
    build(make_plan(recipe(), force=["sft"], until="sft"), sft="second")
    plan = make_plan(recipe())
    assert actions(plan)["sft"] == "cached"
    assert reasons(plan)["awq"] == "upstream sft was rebuilt with other content"


def test_what_stands_on_a_rebuild_with_the_same_content_is_cached(recipe, make_plan, build):
    build(make_plan(recipe()), sft="same")
    build(make_plan(recipe(), force=["sft"], until="sft"), sft="same")
    assert actions(make_plan(recipe()))["awq"] == "cached"


def test_a_forced_stage_runs_and_its_dependents_only_if_its_content_changes(recipe, make_plan, build):
    build(make_plan(recipe()))
    plan = make_plan(recipe(), force=["sft"])
    assert reasons(plan)["sft"] == "forced"
    assert reasons(plan)["awq"] == "only if the content of sft changes, which runs before it"
    assert (plan.stages["sft"].forced, plan.stages["awq"].forced) == (True, False)
    assert actions(plan) == {"base": "cached", "problems": "cached", "sft": "run", "awq": "run"}


def test_a_damaged_artifact_is_named(recipe, make_plan, build):
    artifacts = build(make_plan(recipe()))
    (artifacts["base"].folder / "model" / "content").write_text("short")
    assert "damaged on disk (model/content has 5 bytes instead of 12)" in reasons(make_plan(recipe()))["base"]
    assert "`--force base`" in reasons(make_plan(recipe()))["base"]
    assert reasons(make_plan(recipe(), force=["base"]))["base"] == "forced"


def test_an_artifact_whose_hook_was_cut_short_runs(recipe, make_plan, build):
    built = build(make_plan(recipe()))
    hook.mark(built["awq"].folder, "promote")
    planned = make_plan(recipe()).stages["awq"]
    assert (planned.action, planned.reason) == ("run", "judged, but its verdict has yet to reach MLflow's registry")


def test_until_plans_a_stage_and_what_it_stands_on(recipe, make_plan):
    assert list(make_plan(recipe(), until="sft").stages) == ["base", "problems", "sft"]


@pytest.mark.parametrize("options", [{"force": ["stf"]}, {"until": "stf"}])
def test_an_unknown_stage_is_explained(recipe, make_plan, options):
    with pytest.raises(RecipeError, match="has no stage `stf`; did you mean `sft`"):
        make_plan(recipe(), **options)


def test_a_renamed_stage_is_still_cached(recipe, make_plan, build, tmp_path):
    build(make_plan(recipe()))
    original = recipe()
    renamed = {"start" if name == "base" else name: config for name, config in original.stages.items()}
    renamed["sft"] = renamed["sft"].model_copy(update={"model": "start"})
    plan = make_plan(type(original)("other", tmp_path, renamed))
    assert set(actions(plan).values()) == {"cached"}
