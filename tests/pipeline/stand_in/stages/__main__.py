"""Stand-in for `python -m stages` in processes that have this folder in PYTHONPATH; it runs `tiny_stage.py`."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[3] / "faults" / "tiny_stage.py"))
