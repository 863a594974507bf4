"""A real refresh with stand-ins for models and evaluations; promotions and publications are real.

python candidate_refresh.py RECIPE   prints what `lifecycle run` prints, exits like it
python candidate_refresh.py WORK     is a stage: writes a model, or an evaluation of which `limit` answers are right
"""

import json
import sys
from pathlib import Path

from flows.cli import run_command
from flows.launch import local
from flows.running.request import RefreshRequest
from stages.core.contract import StageConfig, StageInput
from stages.core.supervised import Supervised
from tests.candidates import write_evaluation, write_model

NUM_DOCUMENTS = 100


def launch(work: Path, config: StageConfig) -> Supervised:
    """Launch promotions and publications as usual, and this script for all other stages."""
    if config.kind in ("promote", "publish"):
        return local.start(work, config)
    with (work / "log.txt").open("ab") as log:
        return Supervised([sys.executable, __file__, str(work)], environment=local.environment(config), output=log)


def stage(work: Path) -> None:
    stage_input = StageInput.model_validate_json((work / "config.json").read_bytes())
    if stage_input.kind == "download":
        write_model(work, json.dumps(stage_input.config["files"]))
    elif stage_input.kind == "check":
        (work / "findings.json").write_text("{}")
        (work / "result.json").write_text("{}")
    else:
        right = stage_input.config["limit"]
        write_evaluation(work, [1.0] * right + [0.0] * (NUM_DOCUMENTS - right))


if __name__ == "__main__":
    if Path(sys.argv[1]).is_dir():
        stage(Path(sys.argv[1]))
    else:
        record = run_command.run_refresh(RefreshRequest(sys.argv[1]), quiet=True, launch=launch)
        sys.exit(run_command.answer(record, as_json="--json" in sys.argv))
