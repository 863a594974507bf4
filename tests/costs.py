"""Plugin for pytest that writes each test file's CPU and wall time to `build/suite.json` and prints the slowest.

Counted are the worker and the processes that it has waited for, not servers that outlive the file.
"""

import json
import resource
import time
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WRITTEN = ROOT / "build" / "suite.json"
NUM_SHOWN = 15
COSTS = pytest.StashKey[dict[str, list[float]]]()


def spent_s() -> list[float]:
    """Return the CPU seconds used by this process and its ended children, and the wall clock time in seconds."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return [sum(one.ru_utime + one.ru_stime for one in used), time.monotonic()]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    costs = item.session.stash.setdefault(COSTS, defaultdict(lambda: [0.0, 0.0]))
    before = spent_s()
    try:
        return (yield)
    finally:
        file = costs[str(item.path.relative_to(ROOT))]
        file[:] = [cost + after - start for cost, after, start in zip(file, spent_s(), before, strict=True)]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """Add the times of test files that a pytest-xdist worker measured to the totals."""
    total = node.config.stash.setdefault(COSTS, {})
    total |= getattr(node, "workeroutput", {}).get("costs", {})


def pytest_sessionfinish(session: pytest.Session) -> None:
    costs = session.stash.get(COSTS, {})
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["costs"] = dict(costs)
    else:
        session.config.stash.setdefault(COSTS, {}).update(costs)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    costs = config.stash.get(COSTS, {})
    if len(costs) < NUM_SHOWN:
        return
    largest = sorted(costs.items(), key=lambda entry: -entry[1][0])
    WRITTEN.parent.mkdir(exist_ok=True)
    table = {name: {"processor_s": round(cost[0], 1), "wall_s": round(cost[1], 1)} for name, cost in largest}
    WRITTEN.write_text(json.dumps(table, indent=1) + "\n")
    total = sum(processor_s for processor_s, _ in costs.values())
    terminalreporter.section(f"{total:.0f} s of processor time, of which")
    for name, (processor_s, wall_s) in largest[:NUM_SHOWN]:
        terminalreporter.write_line(f"{processor_s:7.1f} s, {wall_s:6.1f} s by the clock: {name}")
