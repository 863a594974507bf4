"""Stand-in for `python -m stages`, which processes with this folder in PYTHONPATH run: it runs `tiny_stage.py`."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[3] / "faults" / "tiny_stage.py"))
