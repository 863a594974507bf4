"""Nightly refreshes with real Prefect and MLflow promote, reject, roll back and keep the right models."""

import hashlib
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from refreshes import LIFECYCLE, ForkedHome, states

from flows.champion import champions
from flows.champion.registry import CHAMPION, PREVIOUS
from flows.cli.model_commands import canary, rollback
from stages.core.errors import NotPromotedError, StoreError, TransientError
from tests.forked import run_forked
from tests.promotion import NAME, candidate_tree
from tests.serving import write_tasks

pytestmark = pytest.mark.timeout(900)

PROGRAM = Path(__file__).with_name("candidate_refresh.py")
NOWHERE = "http://127.0.0.1:9"


class Nights(ForkedHome):
    """A lifecycle home in which one recipe is refreshed repeatedly, each time with another model."""

    def night(self, model: str, right: int, *options: str) -> subprocess.CompletedProcess[str]:
        tree = candidate_tree(model, min_scores={"sums.exact_match": 0.5})
        tree["scores"] |= {"limit": right, "task_folder": str(self.folder.parent / "tasks")}
        recipe = self.recipe("nightly", **tree)
        return run_forked(PROGRAM, recipe, *options, environment=self.environment)

    def refresh(self, model: str, right: int) -> dict[str, Any]:
        done = self.night(model, right, "--json")
        assert done.stdout, done.stderr
        return json.loads(done.stdout)

    def aliases(self) -> tuple[str, str | None]:
        """Return the version numbers of the champion and of the previous champion."""
        with self.entered():
            registry = champions.connect()
            champion, previous = (registry.find(NAME, alias) for alias in (CHAMPION, PREVIOUS))
        assert champion
        return champion.number, previous and previous.number

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Apply the lifecycle home's environment to this process while the `with` block runs, to import MLflow once."""
        before = dict(os.environ)
        os.environ.clear()
        os.environ.update(self.environment)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)

    def state_in_prefect(self, refresh: dict[str, Any]) -> str:
        (found,) = self.prefect("flow_runs/filter", {"flow_runs": {"name": {"any_": [refresh["refresh"]]}}})
        return found["state"]["name"]

    def tasks_in_prefect(self, refresh: str) -> dict[str, tuple[str, str]]:
        """Return the Prefect state type (which sets the colour) and state name of each of a refresh's tasks."""
        found = self.prefect("task_runs/filter", {"flow_runs": {"name": {"any_": [refresh]}}})
        return {task["name"]: (task["state"]["type"], task["state"]["name"]) for task in found}

    def artifact_of(self, model: str) -> Path | None:
        found = self.folder.glob("store/download/model-*/model/model.safetensors")
        return next((path.parents[1] for path in found if json.dumps([model]).encode() in path.read_bytes()), None)


@pytest.fixture(scope="module")
def nights(lent_home):
    nights = Nights(lent_home)
    write_tasks(nights.folder.parent / "tasks")
    return nights


@pytest.fixture(scope="module")
def first(nights):
    return nights.refresh("a", right=90)


@pytest.fixture(scope="module")
def worse(nights, first):
    return nights.night("b", 60)


@pytest.fixture(scope="module")
def better(nights, worse):
    return nights.refresh("c", right=95)


def test_the_first_candidate_that_keeps_the_gates_is_promoted(nights, first):
    assert first["state"] == "completed"
    assert first["stages"]["promote"]["verdict"] == "promoted"
    assert nights.state_in_prefect(first) == "Promoted"
    champion = json.loads(nights.lifecycle("champion", NAME, "--json").stdout)
    assert (champion["version"], champion["previous"]) == ("1", None)
    assert Path(champion["folder"]) == nights.artifact_of("a")


def test_the_registry_holds_a_link_and_no_weights(nights, first):
    version = nights.mlflow(f"registered-models/alias?name={NAME}&alias=champion")["model_version"]
    tags = {tag["key"]: tag["value"] for tag in version["tags"]}
    assert tags["lifecycle.model"] == f"download/{first['stages']['model']['version']}"
    assert version["run_id"] == first["stages"]["model"]["mlflow_run_id"]
    weights = [path for path in (nights.folder / "mlflow").rglob("*") if path.name.endswith(".safetensors")]
    assert weights == []


def test_a_night_with_nothing_new_is_cached(nights, first):
    again = nights.refresh("a", right=90)
    assert set(states(again).values()) == {"cached"}
    assert again["stages"]["promote"]["verdict"] == "promoted"
    assert nights.state_in_prefect(again) == "Cached"


def test_a_worse_candidate_ends_the_refresh_as_not_promoted_with_a_table(nights, worse):
    assert worse.returncode == NotPromotedError.exit_code
    assert "not promoted" in worse.stdout
    assert "| regression of sums.exact_match (standard errors) | 6.514 | ≤ 2 | **no** | 4.514 |" in worse.stdout
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in (worse.stdout + worse.stderr).splitlines())
    assert nights.aliases() == ("1", None)


def test_the_table_is_an_artifact_in_prefect_and_in_mlflow(nights, worse):
    refresh = worse.stdout.split("lifecycle show ")[1].strip()
    assert nights.state_in_prefect({"refresh": refresh}) == "NotPromoted"
    assert nights.tasks_in_prefect(refresh)["promote"] == ("CANCELLED", "NotPromoted")
    (table,) = nights.prefect("artifacts/latest/filter", {"artifacts": {"key": {"any_": ["verdict-promote"]}}})
    run = nights.attempts("promote")[-1]
    tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
    files = nights.mlflow(f"artifacts/list?run_id={run['info']['run_id']}")["files"]
    assert "missed by" in table["data"]
    assert (tags["verdict"], tags["registered_version"]) == ("not promoted", "2")
    assert {"verdict.md", "verdict.json"} <= {file["path"] for file in files}


def test_a_champion_says_what_it_was_made_from_and_what_differs_from_the_former(nights, better):
    lineage = json.loads(nights.lifecycle("lineage", f"models:/{NAME}@champion", "--json").stdout)
    assert lineage["registered"] == f"version 3 of {NAME}"
    assert lineage["tree"]["version"] == better["stages"]["model"]["version"]
    assert lineage["tree"]["refresh"] == better["refresh"]
    weights = nights.artifact_of("c") / "model" / "model.safetensors"
    hashes = {file["name"]: file["sha256"] for file in lineage["tree"]["files"]}
    assert hashes["model.safetensors"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert [one["scores"] for one in lineage["evaluations"]] == [{"sums.exact_match": 0.95}]
    difference = nights.lifecycle("diff", f"models:/{NAME}/1", f"models:/{NAME}@champion").stdout
    assert "model.safetensors other bytes" in difference
    assert "sums.exact_match 0.9 → 0.95" in difference
    assert nights.lifecycle("lineage", f"models:/{NAME}/99").returncode == StoreError.exit_code


def test_who_is_champion_is_asked_without_the_seconds_that_mlflow_takes_to_import(nights, better):
    command = [sys.executable, "-X", "importtime", "-m", "flows.champion.key"]
    for alias, code in (("champion", 0), ("nobody", StoreError.exit_code)):
        done = subprocess.run(
            [*command, f"models:/{NAME}@{alias}"], env=nights.environment, text=True, capture_output=True
        )
        assert done.returncode == code, done.stderr[-1000:]
        assert not re.search(r"\| +mlflow", done.stderr)
        if code == 0:
            assert json.loads(done.stdout) == {"model": f"download/{better['stages']['model']['version']}"}
    champion = nights.recipe("next", base={"kind": "download", "model": f"models:/{NAME}@champion"})
    assert nights.artifact_of("c").name in nights.lifecycle("plan", str(champion)).stdout


def test_a_better_candidate_follows_and_a_rollback_brings_the_former_back(nights, better):
    assert better["stages"]["promote"]["verdict"] == "promoted"
    assert nights.aliases() == ("3", "1")
    assert nights.lifecycle("rollback", NAME).returncode == 0
    assert nights.aliases() == ("1", "3")
    cached = nights.refresh("c", right=95)
    assert set(states(cached).values()) == {"cached"}
    assert nights.aliases() == ("1", "3")


def test_the_same_model_evaluated_anew_is_already_champion(nights, better):
    assert nights.aliases() == ("1", "3")
    again = nights.refresh("a", right=89)
    assert again["stages"]["promote"]["verdict"] == "already champion"
    champion = json.loads(nights.lifecycle("champion", NAME, "--json").stdout)
    assert champion["evaluations"] == [f"evaluate/{again['stages']['scores']['version']}"]


def test_collection_keeps_what_an_alias_points_to_and_all_that_was_registered_while_mlflow_is_away(nights, better):
    nights.refresh("d", right=10)
    away = {**nights.environment, "MLFLOW_TRACKING_URI": NOWHERE}
    collected = run_forked(LIFECYCLE, "gc", environment=away)
    assert collected.returncode == 0
    assert "keeping every model that was ever registered" in collected.stderr
    assert all(nights.artifact_of(model) for model in "abcd")
    assert nights.lifecycle("gc").returncode == 0
    assert {model for model in "abcd" if nights.artifact_of(model)} == {"a", "c", "d"}


def test_refreshes_beyond_the_policy_go_and_of_those_of_registered_versions_only_the_flow_runs(nights, better):
    (nights.folder / "retention.yaml").write_text("keep: {refreshes: 1, champions: 1}")
    before = nights.refresh("e", right=10)
    latest = nights.refresh("e", right=10)
    flow_runs = {one["name"] for one in nights.prefect("flow_runs/filter", {})}
    done = nights.lifecycle("gc", "--policy", "--json")
    assert done.returncode == 0, done.stderr
    gone = {Path(one["path"]).name for one in json.loads(done.stdout)["garbage"]} & flow_runs
    left = {folder.name for folder in nights.folder.glob("ledger/*")}
    assert gone and left == flow_runs - gone
    assert {before["refresh"], latest["refresh"], better["refresh"]} <= left, "its artifacts, itself, a champion's"
    in_prefect = {one["name"] for one in nights.prefect("flow_runs/filter", {})}
    assert latest["refresh"] in in_prefect and in_prefect < left
    assert in_prefect.isdisjoint({before["refresh"], better["refresh"]})
    of_prefect = [nights.prefect(f"{kind}/filter", {}) for kind in ("artifacts", "task_runs")]
    names = {one["id"]: one["name"] for one in nights.prefect("flow_runs/filter", {})}
    assert all(one["flow_run_id"] in names for found in of_prefect for one in found)
    for run in (run for stage in ("model", "scores", "promote") for run in nights.attempts(stage)):
        tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
        assert tags["lifecycle.attempt"].partition("/")[0] in left
    with closing(sqlite3.connect(nights.folder / "mlflow" / "mlflow.db")) as database:
        assert database.execute("SELECT count(*) FROM runs WHERE lifecycle_stage = 'deleted'").fetchone() == (0,)
        known = {run for (run,) in database.execute("SELECT run_uuid FROM runs")}
    files = {path.name for path in (nights.folder / "mlflow" / "artifacts").glob("*/*")} - {"models"}
    assert files <= known
    version = nights.mlflow(f"registered-models/alias?name={NAME}&alias=champion")["model_version"]
    assert version["run_id"] in known
    assert nights.lifecycle("report", f"{NAME}@champion").returncode == 0


def test_who_has_no_champion_is_told_so(nights, first):
    done = nights.lifecycle("champion", "nobody")
    assert done.returncode == StoreError.exit_code
    assert "of nobody" in done.stderr or "nobody:" in done.stderr


@pytest.mark.parametrize("name", ["nobody", "../../x", "/tmp/x", "a b"])
def test_a_rollback_of_an_unknown_name_makes_no_folder(nights, first, name):
    before = {folder.name for folder in nights.folder.glob("registrations/*")}
    for command, *arguments in ((rollback, name), (canary, name, "--promote")):
        with nights.entered(), pytest.raises(StoreError, match=f" of {re.escape(name)}|{re.escape(name)}:"):
            command.main(arguments, standalone_mode=False)
    assert {folder.name for folder in nights.folder.glob("registrations/*")} == before
    assert not any((nights.folder / path).exists() for path in ("../x", "registrations/../../x"))


def test_without_mlflow_the_registry_is_told_to_be_away(nights, first):
    away = {**nights.environment, "MLFLOW_TRACKING_URI": NOWHERE}
    done = run_forked(LIFECYCLE, "champion", NAME, environment=away)
    assert done.returncode == TransientError.exit_code
    assert NOWHERE in done.stderr and "Traceback" not in done.stderr
