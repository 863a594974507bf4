"""Promotions that are killed, run concurrently or lack MLflow leave one valid champion, and a rerun completes them."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.champion import champions
from flows.champion.registrations import Registration
from flows.champion.registry import CHAMPION, PREVIOUS, Registry
from flows.launch import hook
from flows.running.retries import Retries
from flows.running.runner import BuiltStage, run_stage
from flows.store.collect import verify
from flows.store.content import is_pending
from flows.store.store import Store
from stages.core.errors import LifecycleError, OutdatedVerdictError, TransientError
from stages.kinds.promote.verdict import Verdict
from tests.faults import warm_promotion
from tests.faults.tiny import Notes, processes_of
from tests.promotion import NAME, candidate_tree, offer, planned_stages, promote

GOOD, BETTER = [1.0] * 90 + [0.0] * 10, [1.0] * 95 + [0.0] * 5
CRASHES = [
    ("create_registered_model", 0),
    ("create_model_version", 0),
    ("create_model_version", 1),
    ("set_registered_model_alias", 1),
    ("set_registered_model_alias", 2),
]
"""Moments of a kill: method of MLflow's client and its calls before. Before, between and after writes that matter."""

pytestmark = pytest.mark.timeout(600)


def registration(digest: str) -> Registration:
    return Registration(name=NAME, model=f"download/{digest}", digest=digest, evaluations=())


def become_champion(registry: Registry, digest: str) -> str:
    before = registry.find(NAME)
    number = before.number if before else None
    registered = registry.register(registration(digest), number)
    registry.promote(registered, number)
    return registered.number


def cut_short(store: Store, monkeypatch: pytest.MonkeyPatch, fault: str, error: str) -> Path:
    """Promote a candidate under a PROMOTION_FAULT of `crashing_promotion.py`; match the error, return the artifact."""
    planned, upstream = offer(store, "candidate", BETTER, max_regression_standard_errors=None)
    with monkeypatch.context() as faulty:
        faulty.setenv("PROMOTION_FAULT", fault)
        with pytest.raises(LifecycleError, match=error) as raised:
            run_stage(planned, upstream, store, Notes())
    assert Retries(store).decide(planned, 1, raised.value), "a refresh tries again by itself"
    (artifact,) = (store.root / "promote").iterdir()
    assert is_pending(artifact)
    tree = candidate_tree("candidate", max_regression_standard_errors=None)
    assert planned_stages(store, tree)["promote"].action == "run"
    assert all(one.whole for one in verify(store))
    assert processes_of(store) == []
    return artifact


def promote_candidate(store: Store) -> BuiltStage:
    return promote(store, "candidate", BETTER, max_regression_standard_errors=None)


def verdict_of(built: BuiltStage) -> Verdict:
    return Verdict.model_validate_json((built.artifact / "verdict.json").read_bytes())


def everything_in(mlflow: MlflowClient) -> list[str]:
    """Return all registered versions with their tags, and the aliases with their versions, as lines to compare."""
    versions = sorted(mlflow.search_model_versions(f"name = '{NAME}'"), key=lambda one: int(one.version))
    aliases = mlflow.get_registered_model(NAME).aliases
    return [str(aliases), *(f"{one.version} {one.run_id} {sorted(one.tags.items())}" for one in versions)]


@pytest.mark.parametrize(("method", "number"), CRASHES)
def test_a_crash_leaves_one_valid_champion_and_a_rerun_completes_the_promotion(
    store, registry, fault, monkeypatch, method, number
):
    fault.name, fault.stage = f"SIGKILL at {method} {number}", "promote"
    become_champion(registry, "former")
    artifact = cut_short(store, monkeypatch, f"{method} {number}", "SIGKILL")
    moved = (method, number) == ("set_registered_model_alias", 2)
    champion = champions.find(registry, NAME, CHAMPION)
    assert champion.number == ("2" if moved else "1")
    previous = registry.find(NAME, PREVIOUS)
    assert (previous.number if previous else None) == ("1" if moved else None)
    judged = (artifact / "record.json").read_bytes()

    with fault.timed("recovered"):
        built = promote_candidate(store)

    assert (built.state, built.record.tags["verdict"]) == ("built", "promoted")
    assert (artifact / "record.json").read_bytes() == judged
    champion, previous = registry.find(NAME), registry.find(NAME, PREVIOUS)
    assert champion and previous
    assert (champion.number, previous.number) == ("2", "1")
    assert champion.registration.digest == built.record.upstream["model"].digest
    assert promote_candidate(store).state == "cached"


def test_a_refresh_that_is_killed_between_commit_and_hook_promotes_once_when_run_again(store, registry, fault):
    fault.name, fault.stage = "SIGKILL between commit and hook", "promote"
    killed = subprocess.run([sys.executable, "-m", warm_promotion.__name__, "candidate"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert registry.find(NAME) is None
    with fault.timed("recovered"):
        built = promote(store, "candidate", [1.0] * 100, max_regression_standard_errors=None)
    assert built.state == "built"
    after = everything_in(MlflowClient())
    again = promote(store, "candidate", [1.0] * 100, max_regression_standard_errors=None)
    assert (again.state, everything_in(MlflowClient())) == ("cached", after)
    champion = registry.find(NAME)
    assert champion and (champion.number, len(after)) == ("1", 2)


def test_a_hook_that_is_run_twice_has_run_once(store, registry, fault):
    fault.name, fault.stage = "the hook runs twice", "promote"
    become_champion(registry, "former")
    built = promote_candidate(store)
    after = everything_in(MlflowClient())
    hook.mark(built.artifact, "promote")
    assert promote_candidate(store).state == "built"
    assert everything_in(MlflowClient()) == after


def test_a_forced_promotion_that_is_killed_leaves_nothing_once_the_recipe_runs_again(
    store, registry, fault, monkeypatch
):
    fault.name, fault.stage = "SIGKILL of a forced promotion", "promote"
    promote_candidate(store)
    planned, upstream = offer(store, "candidate", BETTER, max_regression_standard_errors=None)
    with monkeypatch.context() as faulty:
        faulty.setenv("PROMOTION_FAULT", "judge")
        with pytest.raises(LifecycleError, match="SIGKILL"):
            run_stage(replace(planned, forced=True), upstream, store, Notes())
    assert len(list(store.root.glob(".work/promote/*"))) == 1
    with fault.timed("recovered"):
        assert promote_candidate(store).state == "cached"
    assert list(store.root.glob(".work/promote/*")) == []


def test_where_another_became_champion_before_the_hook_the_candidate_is_judged_again(
    store, registry, fault, monkeypatch
):
    fault.name, fault.stage, fault.lost = "overtaken between commit and hook", "promote", "the verdict"
    become_champion(registry, "former")
    artifact = cut_short(store, monkeypatch, "create_registered_model 0", "SIGKILL")
    rival = become_champion(registry, "rival")
    assert Verdict.model_validate_json((artifact / "verdict.json").read_bytes()).champion_version == "1"
    with fault.timed("recovered"):
        built = promote_candidate(store)
    assert (verdict_of(built).champion_version, verdict_of(built).outcome) == (rival, "promoted")
    champion, previous = registry.find(NAME), registry.find(NAME, PREVIOUS)
    assert champion and previous
    assert (champion.registration.digest, previous.number) == (built.record.upstream["model"].digest, rival)


def test_where_mlflow_went_away_after_the_commit_the_hook_is_tried_again(store, registry, fault, monkeypatch):
    fault.name, fault.stage = "MLflow away between commit and hook", "promote"
    cut_short(store, monkeypatch, "away", r"asking for the champion of adder: MLflow at http://127.0.0.1:9")
    with fault.timed("recovered"):
        assert promote_candidate(store).state == "built"
    assert registry.find(NAME)


def test_a_rollback_after_a_promotion_that_was_cut_short_brings_back_the_champion_before(registry, fault):
    fault.name, fault.stage = "promotion cut short, then a rollback", "promote"
    numbers = [become_champion(registry, digest) for digest in ("one", "two")]
    MlflowClient().set_registered_model_alias(NAME, PREVIOUS, numbers[1])  # by a third, which never came
    with fault.timed("recovered"):
        assert registry.rollback(NAME).number == numbers[0]
    assert registry.rollback(NAME).number == numbers[1]


def test_a_rollback_is_not_undone_by_the_hook_that_was_killed_before_it(store, registry, fault, monkeypatch):
    fault.name, fault.stage = "SIGKILL behind the promotion, then a rollback", "promote"
    former = become_champion(registry, "former")
    cut_short(store, monkeypatch, "set_registered_model_alias 2", "SIGKILL")
    assert registry.rollback(NAME).number == former
    with fault.timed("recovered"):
        assert promote_candidate(store).state == "built"
    champion = registry.find(NAME)
    assert champion and champion.number == former
    assert promote_candidate(store).state == "cached"


def test_whoever_was_compared_with_a_former_champion_must_be_compared_again(registry, fault):
    fault.name, fault.stage, fault.lost = "overtaken by a rival", "promote", "the comparison"
    former = become_champion(registry, "former")
    candidate = registry.register(registration("candidate"), former)
    become_champion(registry, "rival")
    with (
        fault.timed("detected"),
        pytest.raises(OutdatedVerdictError, match=r"another became champion \(version 3\); it must be compared again"),
    ):
        registry.promote(candidate, former)
    champion = registry.find(NAME)
    assert champion and champion.registration.digest == "rival"


def test_without_mlflow_nothing_is_decided_and_a_rerun_goes_on(store, registry, fault, monkeypatch):
    fault.name, fault.stage = "MLflow away", "promote"
    with monkeypatch.context() as away:
        away.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        with (
            fault.timed("detected"),
            pytest.raises(TransientError, match=r"asking for the champion of adder: MLflow at http://127.0.0.1:9"),
        ):
            promote(store, "candidate", GOOD)
    assert not list((store.root / "promote").glob("*"))
    with fault.timed("recovered"):
        built = promote(store, "candidate", GOOD)
    assert verdict_of(built).outcome == "promoted"
    assert registry.find(NAME)
