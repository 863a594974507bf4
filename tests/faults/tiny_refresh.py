"""A refresh through Prefect and MLflow whose stage processes are `tiny_stage.py`.

python tiny_refresh.py RECIPE   prints the JSON object of `lifecycle run --json`, exits like it
"""

import json
import sys

import tiny

from flows import run_command
from flows.refresh_run import RefreshRequest

if __name__ == "__main__":
    record = run_command.run_refresh(RefreshRequest(sys.argv[1]), quiet=True, launch=tiny.launch)
    print(json.dumps(run_command.as_json(record)))
    sys.exit(run_command.exit_code(record))
