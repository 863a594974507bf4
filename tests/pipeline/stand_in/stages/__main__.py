"""Stand-in for `python -m stages` of stages whose PYTHONPATH begins here: runs `tiny_stage.py`."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[3] / "faults" / "tiny_stage.py"))
