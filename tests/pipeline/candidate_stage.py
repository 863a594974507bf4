"""Stand-in for a stage that downloads a model, or evaluates one with `limit` right answers. Argument: WORK."""

import json
import sys
from pathlib import Path

from tests.candidates import write_evaluation, write_model

NUM_DOCUMENTS = 100

work = Path(sys.argv[1])
stage_input = json.loads((work / "config.json").read_bytes())
if stage_input["kind"] == "download":
    write_model(work, json.dumps(stage_input["config"]["files"]))
elif stage_input["kind"] == "check":
    (work / "findings.json").write_text("{}")
    (work / "result.json").write_text("{}")
else:
    right = stage_input["config"]["limit"]
    write_evaluation(work, [1.0] * right + [0.0] * (NUM_DOCUMENTS - right))
