"""Plugin for pytest that writes each test file's CPU and wall time to `build/suite.json` and prints the slowest.

Counted are the worker and all processes below it, also those that live on, from which others are forked; but not those
that detach themselves, as a lifecycle home's servers do.
"""

import json
import os
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WRITTEN = ROOT / "build" / "suite.json"
NUM_SHOWN = 15
COSTS = pytest.StashKey[dict[str, list[float]]]()
BEGUN = pytest.StashKey[list[float]]()
"""Times at which the test file that runs began."""


def spent_s() -> list[float]:
    """Return the CPU seconds used by this process and all below it, and the wall clock time in seconds."""
    return [_used_s(os.getpid()), time.monotonic()]


def _used_s(pid: int) -> float:
    """Return the CPU seconds of a process, of the children that it has waited for, and of its living descendants."""
    used_s = 0.0
    with suppress(OSError):  # it has ended since
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        used_s += sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
        for thread in Path(f"/proc/{pid}/task").iterdir():
            used_s += sum(_used_s(int(child)) for child in (thread / "children").read_text().split())
    return used_s


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None):
    stash = item.session.stash
    if BEGUN not in stash:
        stash[BEGUN] = spent_s()
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            file = stash.setdefault(COSTS, defaultdict(lambda: [0.0, 0.0]))[str(item.path.relative_to(ROOT))]
            file[:] = [cost + after - start for cost, after, start in zip(file, spent_s(), stash[BEGUN], strict=True)]
            del stash[BEGUN]


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
