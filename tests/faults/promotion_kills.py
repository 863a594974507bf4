"""Kills of promotions and rollbacks at random moments, spread over their duration.

Run: `promotion_kills.py SEED NUM_KILLS`.
Prints a JSON line for each kill with the champion and its predecessor before the kill and after it. This process
imports MLflow once, and runs each promotion, rollback and look at the registry in a fork of its own.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlflow.store.model_registry.sqlalchemy_store
import mlflow.store.tracking.sqlalchemy_store
import mlflow.tracking.fluent  # noqa: F401 (the three are for the forks)

from flows.champion import champions, promotion
from flows.champion.registrations import promotion_lock
from flows.champion.registry import CHAMPION, PREVIOUS, Registry
from flows.ledger.home import home, store_root
from flows.store.store import Store
from stages.kinds.promote.verdict import VERDICT_FILE, Verdict
from tests.promotion import NAME, commit, offer, write_question

LATEST = 1.5
"""Time of the latest kill, in units of a promotion's normal duration: some kills come after the promotion's end."""
Standing = tuple[str | None, str | None]
"""Type of a pair of version numbers: champion and previous champion. Each is None if the registry has none."""


def forked(act: Callable[[], object], kill_after_s: float | None = None) -> str:
    """Run a function in a fork; return its result as JSON, or "" if it was killed after `kill_after_s`."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        os.write(writer, json.dumps(act()).encode())
        os._exit(0)
    os.close(writer)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    with os.fdopen(reader) as stream:
        said = stream.read()
    os.waitpid(pid, 0)
    return said


def look() -> Standing:
    """Return the version numbers of champion and previous champion as `lifecycle champion` finds them."""
    registry = champions.connect()
    found = champions.find(registry, NAME, CHAMPION)
    previous = registry.find(NAME, PREVIOUS)
    needed = {one.registration.model.rpartition("/")[2] for one in (found, previous) if one}
    assert needed <= champions.kept_versions()
    return found.number, previous.number if previous else None


def roll_back() -> None:
    with promotion_lock(NAME):
        Registry().rollback(NAME)


def promotion_of(mark: str, champion: str | None) -> Callable[[], None]:
    """Store a candidate that was found better than the champion; return a function that completes its promotion."""
    store = Store(store_root())
    planned, upstream = offer(store, mark, [1.0] * 10, max_regression_standard_errors=None)
    verdict = Verdict(outcome="promoted", name=NAME, champion_version=champion, against=None, missed=())

    def write(work: Path) -> None:
        write_question(work, planned, upstream)
        (work / VERDICT_FILE).write_text(verdict.model_dump_json())

    built = commit(store, planned, upstream, write)
    work = home() / "hook"
    work.mkdir(exist_ok=True)
    return lambda: promotion.complete(built.artifact, work)


def main(seed: int, num_kills: int) -> None:
    chance = random.Random(seed)
    started_s = time.monotonic()
    forked(promotion_of("first", None))
    duration_s = time.monotonic() - started_s
    standing: Standing = tuple(json.loads(forked(look)))
    moments = [(number + chance.random()) / num_kills for number in range(num_kills)]
    chance.shuffle(moments)
    for number, moment in enumerate(moments):
        champion, previous = standing
        rolls_back = previous is not None and chance.random() < 0.3
        move = roll_back if rolls_back else promotion_of(f"{seed}-{number}", champion)
        forked(move, kill_after_s=LATEST * moment * duration_s)
        found = tuple(json.loads(forked(look)))
        print(json.dumps({"rollback": rolls_back, "before": standing, "after": found}), flush=True)
        if not rolls_back and found == standing and chance.random() < 0.5:
            forked(move)  # the next run of the recipe
            found = tuple(json.loads(forked(look)))
            print(json.dumps({"again": True, "before": standing, "after": found}), flush=True)
        standing = found


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
