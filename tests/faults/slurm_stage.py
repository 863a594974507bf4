"""Stage for tests of Slurm faults: a Slurm job whose program is the stand-in `tiny_stage.py`.

python slurm_stage.py STORE MODE   runs it to the end, and prints how it ended
"""

import functools
import sys
from pathlib import Path
from typing import Any

import tiny

from flows.launch import cluster
from flows.launch.cluster import ClusterProcess
from flows.launch.cluster_job import HEARTBEAT_PATIENCE_S
from flows.planning.plan import PlannedStage
from flows.running.runner import BuiltStage, run_stage
from flows.store.store import Store
from stages.core.contract import StageConfig

SHORT_PATIENCE_S = 15.0


def launch(work: Path, config: StageConfig, heartbeat_patience_s: float = HEARTBEAT_PATIENCE_S) -> ClusterProcess:
    """Launch a stage as the Slurm launcher does, but with the stand-in `tiny_stage.py` as its program."""
    command = [str(tiny.SCRIPT), str(work)]
    return cluster.start(work, config, stage_command=command, heartbeat_patience_s=heartbeat_patience_s)


def planned_stage(store: Store, mode: str, environment: dict[str, str] | None = None, **options: Any) -> PlannedStage:
    """Plan a stage that Slurm runs with `tiny_stage.py` in a mode. options: of the recipe's `slurm` block."""
    execution = {"launcher": "slurm", "environment": environment or {}, "slurm": options}
    return tiny.planned_stages(store, {"rows": tiny.stage(mode, **execution)})["rows"]


def build(store: Store, mode: str, environment: dict[str, str] | None = None, **options: Any) -> BuiltStage:
    return run_stage(planned_stage(store, mode, environment, **options), {}, store, tiny.Notes(), launch=launch)


if __name__ == "__main__":
    store = Store(Path(sys.argv[1]))
    short = functools.partial(launch, heartbeat_patience_s=SHORT_PATIENCE_S)
    built = run_stage(planned_stage(store, sys.argv[2]), {}, store, tiny.Notes(), launch=short)
    print(built.state)
