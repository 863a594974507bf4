"""Promotions that are killed, raced, or left without MLflow: one valid champion remains, and a rerun goes on."""

import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.champion.registrations import Registration
from flows.champion.registry import PREVIOUS, Registry
from flows.launch import local
from flows.ledger.home import store_root
from flows.running.runner import run_stage
from flows.store.store import Store
from stages.core.contract import StageConfig
from stages.core.errors import StageCrashError, TransientError
from stages.core.supervised import Supervised
from stages.promote.verdict import Verdict
from tests.faults.tiny import Notes, processes_of
from tests.promotion import NAME, offer, own_mlflow, promote

GOOD, BETTER = [1.0] * 90 + [0.0] * 10, [1.0] * 95 + [0.0] * 5
CRASHING = Path(__file__).with_name("crashing_promotion.py")
CRASHES = [
    ("create_registered_model", 0),
    ("create_model_version", 0),
    ("create_model_version", 1),
    ("set_registered_model_alias", 1),
    ("set_registered_model_alias", 2),
]
"""Before anything is written, between any two writes that matter, and after the last."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def registry(tmp_path, monkeypatch):
    for name, value in own_mlflow(tmp_path).items():
        monkeypatch.setenv(name, value)
    return Registry()


@pytest.fixture
def store(registry):
    return Store(store_root())


def registration(digest: str) -> Registration:
    return Registration(name=NAME, model=f"download/{digest}", digest=digest, evaluations=())


def become_champion(registry: Registry, digest: str) -> str:
    before = registry.find(NAME)
    number = before.number if before else None
    registered = registry.register(registration(digest), number)
    registry.promote(registered, number)
    return registered.number


def crash(store: Store, method: str, number: int, mark: str = "candidate") -> None:
    """Run a promotion that is killed at that point of its talk with MLflow."""

    def launch(work: Path, config: StageConfig) -> Supervised:
        with (work / "log.txt").open("ab") as log:
            command = [sys.executable, str(CRASHING), str(work), method, str(number)]
            return Supervised(command, environment=local.environment(config), output=log)

    planned, upstream = offer(store, mark, BETTER, max_regression_standard_errors=None)
    with pytest.raises(StageCrashError, match="SIGKILL"):
        run_stage(planned, upstream, store, Notes(), launch=launch)


@pytest.mark.parametrize(("method", "number"), CRASHES)
def test_a_crash_leaves_one_valid_champion_and_a_rerun_completes_the_promotion(store, registry, fault, method, number):
    fault.name, fault.stage = f"SIGKILL at {method} {number}", "promote"
    become_champion(registry, "former")
    crash(store, method, number)
    done = (method, number) == ("set_registered_model_alias", 2)
    champion = registry.find(NAME)
    assert champion and champion.number == ("2" if done else "1")
    assert not list((store.root / "promote").glob("*"))
    assert processes_of(store) == []

    with fault.timed("recovered"):
        built = promote(store, "candidate", BETTER, max_regression_standard_errors=None)

    assert built.record.tags["verdict"] == ("already champion" if done else "promoted")
    champion, previous = registry.find(NAME), registry.find(NAME, PREVIOUS)
    assert champion and previous
    assert (champion.number, previous.number) == ("2", "1")
    assert champion.registration.digest == built.record.upstream["model"].digest


def test_a_rollback_after_a_promotion_that_was_cut_short_brings_back_the_champion_before(registry, fault):
    fault.name, fault.stage = "promotion cut short, then a rollback", "promote"
    numbers = [become_champion(registry, digest) for digest in ("one", "two")]
    MlflowClient().set_registered_model_alias(NAME, PREVIOUS, numbers[1])  # by a third, which never came
    with fault.timed("recovered"):
        assert registry.rollback(NAME).number == numbers[0]
    assert registry.rollback(NAME).number == numbers[1]


def test_whoever_was_compared_with_a_former_champion_must_be_compared_again(registry, fault):
    fault.name, fault.stage, fault.lost = "overtaken by a rival", "promote", "the comparison"
    former = become_champion(registry, "former")
    candidate = registry.register(registration("candidate"), former)
    become_champion(registry, "rival")
    with (
        fault.timed("detected"),
        pytest.raises(TransientError, match=r"another became champion \(version 3\); it must be compared again"),
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
    assert Verdict.model_validate_json((built.artifact / "verdict.json").read_bytes()).outcome == "promoted"
    assert registry.find(NAME)
