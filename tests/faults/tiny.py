"""Helpers for tests with refreshes of one stage, run by the stand-in `tiny_stage.py` without Prefect and MLflow.

python tiny.py STORE MODE   runs it to the end, and prints whether it waits and how it ended
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.launch import local
from flows.planning.plan import PlannedStage, plan
from flows.recipe.recipe import load_stages
from flows.running.runner import Attempt, AttemptEnd, BuiltStage, run_stage
from flows.store.store import Store
from stages.core.contract import StageConfig
from stages.core.errors import RefreshStoppedError
from stages.core.process_tree import living_processes
from stages.core.supervised import SupervisedProcess

PATIENCE_S = 300.0
SCRIPT = Path(__file__).with_name("tiny_stage.py")


@dataclass
class Notes:
    """Observer of a running stage, for tests: it records that the stage waits, starts, goes on or ends."""

    said: list[str] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    outcomes: list[AttemptEnd] = field(default_factory=list)

    def waiting(self) -> None:
        self.said.append("waiting")

    def started(self, attempt: Attempt) -> str:
        self.said.append("started")
        self.attempts.append(attempt)
        return f"tiny/{attempt.planned.name}-{attempt.number}"

    def tick(self) -> None:
        self.said.append("tick")

    def ended(self, outcome: AttemptEnd) -> None:
        self.said.append("ended")
        self.outcomes.append(outcome)


@dataclass
class Interrupter(Notes):
    """Observer of a running stage, for tests: it stops the stage at the first checkpoint."""

    stop: threading.Event = field(default_factory=threading.Event)

    def tick(self) -> None:
        super().tick()
        if (self.attempts[-1].work / "scratch" / "step").exists():
            self.stop.set()


def interrupt(planned: PlannedStage, upstream: Mapping[str, BuiltStage], store: Store, *, attempt: int = 1) -> Attempt:
    """Run a stage that pauses after its fifth step, and stop it at its first checkpoint; return the interrupted try."""
    notes = Interrupter()
    try:
        run_stage(planned, upstream, store, notes, attempt=attempt, stop=notes.stop, launch=launch)
    except RefreshStoppedError:
        return notes.attempts[0]
    raise AssertionError("the stage ended before it could be stopped")


def launch(work: Path, config: StageConfig) -> SupervisedProcess:
    """Launch a stage as the local launcher does, but with the stand-in `tiny_stage.py` as its program."""
    command = local.command(work, config)[: -len(["-m", "stages", str(work)])]
    with (work / "log.txt").open("ab") as log:
        return SupervisedProcess(
            [*command, str(SCRIPT), str(work)], environment=local.environment(config), output=log, grace_s=1.0
        )


def planned_stages(
    store: Store, tree: Mapping[str, Mapping[str, object]], force: tuple[str, ...] = ()
) -> dict[str, PlannedStage]:
    """Plan the stages of a recipe, given as nested dicts."""
    recipe = load_stages("tiny", Path("/"), tree)
    return plan(recipe, {name: {} for name in recipe.stages}, store.index(), force=force).stages


def stage(mode: str, **execution: object) -> dict[str, object]:
    """Return a download stage run by `tiny_stage.py` in a mode. execution: more fields of its `execution` block."""
    environment = {"TINY": mode, **execution.pop("environment", {})}
    return {"kind": "download", "dataset": "builtin/addition", "execution": {"environment": environment, **execution}}


def model_stage() -> dict[str, object]:
    """Return a recipe's download stage whose artifact is a model; its process is the stand-in `tiny_stage.py`."""
    return {**stage("ok"), "dataset": None, "model": "builtin/qwen3-1m"}


def build(
    store: Store,
    mode: str,
    *,
    notes: Notes | None = None,
    force: bool = False,
    stop: threading.Event | None = None,
    **execution: object,
) -> BuiltStage:
    """Plan and run one stage whose process is the stand-in `tiny_stage.py` in the given mode."""
    planned = planned_stages(store, {"rows": stage(mode, **execution)}, force=("rows",) if force else ())["rows"]
    return run_stage(planned, {}, store, notes or Notes(), stop=stop, launch=launch)


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """Wait until a condition returns a true value, and return the value; fail with the message `what` on timeout."""
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.02)
    return found


def processes_of(store: Store) -> list[int]:
    """Return the ids of living processes that have the store's path in their arguments or environment."""
    found = set()
    for pid in living_processes():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            tokens = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if str(store.root).encode() in command + tokens:
            found.add(pid)
    return sorted(found - {os.getpid()})


class Speaker(Notes):
    """Observer of a stage, for tests: it prints a line as soon as the stage waits for another refresh."""

    def waiting(self) -> None:
        super().waiting()
        print("waits", flush=True)


if __name__ == "__main__":
    observed = Speaker()
    built = build(Store(Path(sys.argv[1])), sys.argv[2], notes=observed)
    print(built.state)
