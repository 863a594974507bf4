"""Rank program (`tests/parity/ranks.py`) of a train stage with its imports already made: `[WORK, ENVIRONMENT]`.

ENVIRONMENT: a JSON object of the variables that a process of the stage has.
"""

import json
import os
import sys
from importlib import import_module

from stages.__main__ import main as run_stage
from stages.models.start_up import start_training_quickly

start_training_quickly()
for name in (
    "stages.kinds.train.run",
    "stages.engines.fsdp.engine",
    "stages.engines.fsdp.eva",
    "stages.adapters.check",
    "stages.adapters.effect",
    "stages.adapters.lora",
    "torch._dynamo",
    "transformers.models.qwen3.modeling_qwen3",
    "matplotlib.figure",
):
    import_module(name)


def main() -> None:
    os.environ |= json.loads(sys.argv[2])
    sys.argv = sys.argv[:2]
    run_stage()
