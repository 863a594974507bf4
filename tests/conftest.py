"""Hooks for all tests: the longest files run first, a crash fails one test, no process outlives the last, and none has
real-time priority."""

import gc
import os
from collections.abc import Generator

import pytest

from tests.costs import pytest_runtest_protocol, pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown
from tests.crashed_workers import pytest_xdist_make_scheduler
from tests.databases import new_databases
from tests.sweeper import pytest_configure, pytest_unconfigure

__all__ = [
    "new_databases",
    "pytest_configure",
    "pytest_runtest_protocol",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
    "pytest_testnodedown",
    "pytest_unconfigure",
    "pytest_xdist_make_scheduler",
]

# Threads that spin at a barrier take the core from the other file's test. torch reads this when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

LONGEST = (
    "test_quickstart.py",
    "test_schedule.py",
    "test_grpo.py",
    "test_server_faults.py",
    "test_megatron_layouts.py",
    "test_notifications.py",
    "test_serve_evaluate.py",
    "test_promote.py",
    "test_methods.py",
    "test_retry.py",
    "test_fsdp.py",
    "test_server_doors.py",
    "test_secrets.py",
    "test_adapters.py",
    "test_megatron_faults.py",
    "test_champion_again.py",
    "test_serve_adapters.py",
    "test_compare.py",
    "test_megatron.py",
    "test_killed_anywhere.py",
    "test_train_faults.py",
    "test_follow.py",
    "test_megatron_checkpoints.py",
    "test_store_faults.py",
    "test_predicted_memory.py",
    "test_promote_faults.py",
    "test_train.py",
    "test_slurm.py",
    "test_publish.py",
    "test_old_home.py",
    "test_quantize.py",
    "test_mixture.py",
    "test_team_servers.py",
    "test_quantize_families.py",
    "test_database_faults.py",
    "test_team_doors.py",
    "test_supervised_serving.py",
    "test_core_faults.py",
    "test_refresh.py",
    "test_compiled_layers.py",
    "test_pieces.py",
    "test_supervisor.py",
)
"""Test files that take minutes, slowest first, so that no pytest worker starts one last while the others wait. Short
tests fill the rest, those in `unit` last. Files that compute and files that wait for servers take turns. The times are
those of `build/suite.json`, which `make test` writes."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Turn off garbage collection while tests are collected, and freeze the imported objects.

    Scanning a million objects repeatedly took a fifth of the collection, and some of the time of every test.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ("unit" in item.path.parts, places.get(item.path.name, len(places))))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Fail a test after which this process has real-time priority, which would starve the servers of all others.

    Encoders of some codecs take it where they may, in any process of root.
    """
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        pytest.fail(f"{item.nodeid} or what it imports gave this process real-time priority")
