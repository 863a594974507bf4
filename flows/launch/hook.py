"""Update of MLflow's model registry by a separate program, after a promote stage's artifact is in the store.

A work folder is marked before it is moved into the store, and its artifact keeps the mark until the program has
succeeded. When a crash or an absent MLflow cuts the program short, the next refresh that finds the artifact cached sees
the mark and runs the program again.
"""

import sys
import threading
from collections.abc import Callable
from pathlib import Path

from flows.launch.failures import read_result
from flows.launch.local import PROGRAMS, environment
from flows.launch.stage_process import watch
from flows.planning.plan import PlannedStage
from flows.store.content import LOG_FILE, PENDING_HOOK_FILE
from flows.store.store import Store
from stages.core.approval import AWAITED, VERDICT_TAG
from stages.core.contract import StageResult
from stages.core.supervised import SupervisedProcess


def mark(work: Path, kind: str) -> None:
    """Mark a promote stage's work folder, before it becomes an artifact, as not yet registered in MLflow."""
    if kind in PROGRAMS:
        (work / PENDING_HOOK_FILE).touch()


def complete(
    store: Store, planned: PlannedStage, artifact: Path, tick: Callable[[], None], stop: threading.Event
) -> StageResult:
    """Run the program that registers a promote stage's model in MLflow, then record in the artifact that it has run.

    The mark stays while a person has yet to approve the promotion. The caller holds the lock of the stage. The program
    gets a new work folder, since the former one is now the artifact. Returns the stage's result with the program's
    tags. Raises what `watch` raises, the program's own error included.
    """
    work = store.work_folder(planned.kind, planned.name, planned.resume_key)
    store.remove(work)
    store.make_folder(work)
    command = [sys.executable, "-m", PROGRAMS[planned.kind], "complete", str(artifact), str(work)]
    with store.explained(f"complete {planned.name}"), (work / LOG_FILE).open("ab") as log:
        (work / "events.jsonl").touch()  # observers open it before it is removed
        process = SupervisedProcess(command, environment=environment(planned.config), output=log)
    added = watch(process, planned, work, tick, stop).tags
    if added.get(VERDICT_TAG) != AWAITED:
        # From here on the artifact is found cached, without this program.
        store.remove_mark(artifact)
    store.remove(work)
    result = read_result(artifact, planned.name)
    return result.model_copy(update={"tags": {**result.tags, **added}})
