"""Pipeline run for tests: promotions and publications are real, models and evaluations are made up.

python candidate_refresh.py RECIPE   prints what `lifecycle run` prints, exits like it
"""

import sys
from pathlib import Path

from flows.cli import run_command
from flows.launch import local
from flows.running.request import RefreshRequest
from stages.core.contract import StageConfig
from stages.core.supervised import SupervisedProcess

STAGE = Path(__file__).with_name("candidate_stage.py")


def launch(work: Path, config: StageConfig) -> SupervisedProcess:
    """Launch promotions and publications as usual, and all other stages as the stand-in `candidate_stage.py`."""
    if config.kind in ("promote", "publish"):
        return local.start(work, config)
    with (work / "log.txt").open("ab") as log:
        return SupervisedProcess(
            [sys.executable, str(STAGE), str(work)], environment=local.environment(config), output=log
        )


if __name__ == "__main__":
    record = run_command.run_refresh(RefreshRequest(sys.argv[1]), quiet=True, launch=launch)
    sys.exit(run_command.print_outcome(record, as_json="--json" in sys.argv))
