"""Fixtures of the fault tests: they check that nothing is left behind, and collect recovery times for `make faults`."""

import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import chain
from fault_table import Fault, lines
from leftovers import MARK_VARIABLE, Leftovers, new

from flows.launch import local
from flows.ledger.home import store_root
from flows.store.store import Store
from tests.faults import warm_promotion
from tests.promotion import own_mlflow

PATIENCE_S = 30.0


@pytest.fixture(scope="session", autouse=True)
def leftovers(tmp_path_factory: pytest.TempPathFactory) -> Leftovers:
    return Leftovers(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module", autouse=True)
def marked(leftovers: Leftovers) -> Iterator[None]:
    """Mark the processes that fault tests start by an environment variable, so that those left behind are found."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in leftovers.environment().items():
            patch.setenv(name, value)
        yield


@pytest.fixture(autouse=True)
def nothing_is_left(leftovers: Leftovers) -> Iterator[None]:
    """Fail a test that leaves behind a process, shared memory, a held lock or a temporary file."""
    before = leftovers.look()
    yield
    end_s = time.monotonic() + PATIENCE_S
    while (left := new(before, leftovers.look())) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not left, "left behind: " + "; ".join(left)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, tuple[object, object]]]:
    """Provide a function: number of ranks → artifact versions and digests of a refresh without faults."""

    @functools.cache
    def identities(ranks: int) -> dict[str, tuple[object, object]]:
        return chain.identities(chain.run_refresh(tmp_path_factory.mktemp("undisturbed"), ranks))

    return identities


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Provide the environment variable that makes promotions fork from a process that has imported MLflow."""
    with warm_promotion.started(tmp_path_factory.mktemp("warm") / "socket", MARK_VARIABLE) as variables:
        yield variables


@pytest.fixture
def new_fault(request: pytest.FixtureRequest) -> Callable[[str, str], Fault]:
    """Provide a function that records a fault in a stage; `make faults` prints the record if the test passes."""

    def make(name: str, stage: str) -> Fault:
        one = Fault(name, stage)
        request.node.user_properties.append(("fault", vars(one)))  # plain values: pytest-xdist sends them on
        return one

    return make


@pytest.fixture
def fault(request: pytest.FixtureRequest, new_fault: Callable[[str, str], Fault]) -> Fault:
    """Provide the record of a test's fault, whose name and stage it sets, for the table of `make faults`."""
    return new_fault(request.node.name, "")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed = terminalreporter.stats.get("passed", [])
    faults = [Fault(**fields) for report in passed for name, fields in report.user_properties if name == "fault"]
    if faults:
        terminalreporter.section(f"{len(faults)} faults")
        for line in lines(faults):
            terminalreporter.write_line(line)


@pytest.fixture
def registry(tmp_path, monkeypatch, warm):
    """Provide the registry of an MLflow of its own, which promotions in this process use."""
    from flows.champion.registry import Registry

    monkeypatch.setitem(local.PROGRAMS, "promote", warm_promotion.__name__)
    for name, value in {**own_mlflow(tmp_path), **warm}.items():
        monkeypatch.setenv(name, value)
    return Registry()


@pytest.fixture
def store(registry):
    return Store(store_root())
