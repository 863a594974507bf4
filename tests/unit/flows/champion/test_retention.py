"""The retention policy: valid settings, which refreshes are too old, and which of their files are deleted."""

import json
import os
import shutil
import time
from uuid import uuid4

import pytest

from flows.champion import servers_folder
from flows.champion.retention import Housekeeping
from flows.champion.servers_folder import own_folder
from flows.ledger.events import FlowRunKnown, PlannedEntry, RefreshBegan, RefreshEnded
from flows.ledger.process_identity import ProcessIdentity
from flows.ledger.refreshes import ledger_of, ledgers
from flows.store.policy import Policy, RetentionLimits, read_policy
from stages.core.errors import RecipeError

DAY_MS = 86_400_000


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Provide a temporary lifecycle home around the store in which other fixtures put artifacts."""
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    for variable in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def ledger_with(name, days_ago, versions=(), *, recipe="nightly", ended=True, flow_run=None):
    """Write the event log of a refresh `days_ago`. versions: of its stages, all of kind train, by stage name."""
    ledger = ledger_of(name)
    events = [
        RefreshBegan(
            refresh=name,
            recipe=recipe,
            recipe_path=ledger.folder / "nightly.yaml",
            process=ProcessIdentity.own(),
            hardware="1 × abacus",
            git_commit=None,
            stages={stage: PlannedEntry(kind="train", version=version) for stage, version in dict(versions).items()},
            time_ms=time.time_ns() // 1_000_000 - round(days_ago * DAY_MS),
        ),
        *([FlowRunKnown(prefect_flow_run_id=flow_run, prefect_run_count=1)] if flow_run else []),
        *([RefreshEnded(state="completed", seconds=1.0)] if ended else []),
    ]
    for event in events:
        ledger.append(event)
    return ledger


def collected(**keep):
    return Housekeeping(Policy(keep=RetentionLimits(**keep)), older_than_days=7).collect()


def left():
    return {ledger.folder.name for ledger in ledgers()}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file: found 'null'; expected a mapping with `keep`"),
        ("keep: {}", "keep: names neither `refreshes` nor `days`"),
        ("keep: {refreshes: 0}", "keep.refreshes: found '0'; expected a whole number, 1 or more"),
        ("keep: {refreshes: true}", "keep.refreshes: found 'true'"),
        ("keep: {days: -1}", "keep.days: found '-1'; expected a number above 0"),
        ("keep: {days: .inf}", "keep.days: found 'Infinity'"),
        ("keep: {days: 1, weeks: 2}", "keep: there is no field 'weeks'; expected a mapping with `refreshes`, `days`"),
        ("keep: {days: 1, champions: few}", "keep.champions: found 'few'; expected `all`, or a whole number, 1 or"),
        ("kept: {days: 1}", "the file: there is no field 'kept'"),
        ("keep: [", "line 2: not valid YAML"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused_with_what_is_allowed(home, text, said):
    (home / "retention.yaml").write_text(text)
    with pytest.raises(RecipeError) as raised:
        read_policy()
    assert said in str(raised.value)
    assert str(home / "retention.yaml") in str(raised.value)


def test_no_policy_is_the_default_and_each_of_its_fields_has_one(home):
    assert read_policy() is None
    (home / "retention.yaml").write_text("keep: {refreshes: 30, days: 90, champions: all}")
    assert read_policy() == Policy(keep=RetentionLimits(refreshes=30, days=90.0))


@pytest.mark.parametrize(
    ("keep", "gone"),
    [
        ({"refreshes": 2}, {"third", "fourth"}),
        ({"days": 25}, {"fourth", "of-another"}),
        ({"refreshes": 2, "days": 25}, {"fourth"}),
        ({"refreshes": 10}, set()),
    ],
)
def test_a_refresh_stays_that_is_among_the_latest_of_its_recipe_or_young_or_runs(home, keep, gone):
    for place, name in enumerate(("first", "second", "third", "fourth")):
        ledger_with(name, days_ago=10 * place + 1)
    ledger_with("of-another", days_ago=100, recipe="weekly")
    ledger_with("running", days_ago=100, ended=False)
    before = left()
    copied = [home / "trackers" / "tensorboard" / name / "sft-1" for name in before]
    for run in copied:
        run.mkdir(parents=True)
    assert collected(**keep).failures == ()
    assert before - left() == gone
    assert {run.parent.name for run in copied if run.exists()} == left()


def test_artifacts_of_refreshes_that_stay_are_kept_and_those_of_others_go(store, recipe, make_plan, build):
    artifacts = []
    for night, days_ago in enumerate((3, 2, 1)):
        artifacts.append(build(make_plan(recipe(sft={"steps": night + 1}))))
        versions = {name: one.record.version for name, one in artifacts[-1].items()}
        ledger_with(f"night-{night}", days_ago, versions)
    collected(refreshes=2)
    assert left() == {"night-1", "night-2"}
    assert not artifacts[0]["sft"].folder.exists(), "superseded, and of no refresh that stays"
    for kept in (artifacts[1]["sft"], artifacts[2]["sft"], artifacts[0]["base"]):
        assert kept.folder.exists()


def test_a_refresh_that_built_what_stays_stays(store, recipe, make_plan, build):
    built = build(make_plan(recipe()))
    record = built["base"].folder / "record.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "attempt": "oldest/base-1"}))
    for name, days_ago in (("oldest", 3), ("older", 2), ("latest", 1)):
        ledger_with(name, days_ago)
    collected(refreshes=1)
    assert left() == {"oldest", "latest"}


def test_a_refresh_stays_while_its_server_is_away_and_all_else_is_removed(home, store, recipe, make_plan, build):
    ledger_with("known-to-prefect", 2, flow_run=str(uuid4()))
    ledger_with("latest", 1)
    old = build(make_plan(recipe()))
    build(make_plan(recipe(sft={"steps": 5})))
    run = home / "trackers" / "wandb" / "known-to-prefect"
    run.mkdir(parents=True)
    done = collected(refreshes=1)
    assert left() == {"known-to-prefect", "latest"} and run.exists()
    assert not old["sft"].folder.exists()
    (failure,) = done.failures
    assert "cannot remove 1 refreshes beyond the retention policy: the local prefect server is not running" in failure


def test_a_refresh_whose_ledger_is_damaged_stays_with_its_artifacts_and_the_others_are_judged(
    store, recipe, make_plan, build
):
    built = [build(make_plan(recipe(sft={"steps": steps}))) for steps in (1, 2, 3)]
    for night, artifacts in enumerate(built):
        ledger_with(f"night-{night}", 3 - night, {name: one.record.version for name, one in artifacts.items()})
    with ledger_of("night-0").file.open("ab") as stream:
        stream.write(b'{"event":"refresh_teleported"}\n')
    (failure,) = collected(refreshes=1).failures
    assert failure.startswith("cannot judge a refresh by the retention policy: reading the ledger of refresh night-0")
    assert left() == {"night-0", "night-2"}
    assert [one["sft"].folder.exists() for one in built] == [True, False, True]


def test_what_killed_servers_left_goes_once_it_is_old(home, monkeypatch):
    servers = home / "servers"
    servers_folder.note_tallies("alive", {})
    note = next(servers.glob("canary-alive-*.json"))
    killed = json.loads(note.read_text())
    killed["process"]["started_ticks"] += 1
    (servers / "canary-dead-1.json").write_text(json.dumps(killed))
    (servers / "canary-young-1.json").write_text(json.dumps(killed))
    (servers / "adder-1-abcdefgh").mkdir()  # as an earlier version made one for each engine
    (servers / "adder-2-abcdefgh").mkdir()
    (servers / "serving-abcdefgh").mkdir()
    (servers / "adder-1.log").touch()
    with own_folder() as folder, monkeypatch.context() as patch:
        (servers / "serving-abcdefgh").mkdir()
        old_s = time.time() - 8 * 86_400
        for path in servers.iterdir():
            if "young" not in path.name:
                os.utime(path, (old_s, old_s))
        os.utime(folder / "lock", (old_s, old_s))
        patch.chdir(servers / "adder-2-abcdefgh")  # an engine of an earlier version still runs
        done = Housekeeping(None, older_than_days=7).collect()
        gone = {"canary-dead-1.json", "adder-1-abcdefgh", "serving-abcdefgh"}
        assert {one.path.name for one in done.removed} == gone
        left = {note.name, "canary-young-1.json", "adder-2-abcdefgh", "adder-1.log", folder.name, "serving.lock"}
        assert {path.name for path in servers.iterdir()} == left


def test_in_a_copied_home_no_canary_of_the_original_is_shown(home, monkeypatch):
    (home / "original").mkdir()
    monkeypatch.setenv("LIFECYCLE_HOME", str(home / "original"))
    servers_folder.note_tallies("adder", {"champion": "1", "challenger": "2"})
    shutil.copytree(home / "original", home / "copy")
    (shown,) = servers_folder.served_canaries("adder")
    assert shown.keys() == {"champion", "challenger", "time_s"}
    monkeypatch.setenv("LIFECYCLE_HOME", str(home / "copy"))
    assert servers_folder.served_canaries("adder") == []
    assert [path.parent for path in servers_folder.left_notes()] == [home / "copy" / "servers"]


def test_without_a_policy_all_refreshes_stay():
    ledger_with("ancient", 1000)
    assert Housekeeping(None, older_than_days=0).garbage == []
