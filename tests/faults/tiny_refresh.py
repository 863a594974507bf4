"""A refresh through Prefect and MLflow whose stage processes are all the stand-in `tiny_stage.py`.

python tiny_refresh.py RECIPE            prints the JSON object of `lifecycle run --json`, exits like it
python tiny_refresh.py --retry REFRESH   of `lifecycle retry --json`
"""

import sys

import tiny

from flows.cli import run_command
from flows.running.request import RefreshRequest

if __name__ == "__main__":
    if sys.argv[1] == "--retry":
        record = run_command.retry_refresh(sys.argv[2], quiet=True, launch=tiny.launch)
    else:
        record = run_command.run_refresh(RefreshRequest(sys.argv[1]), quiet=True, launch=tiny.launch)
    sys.exit(run_command.print_outcome(record, as_json=True))
