"""Run a merge stage and print its peak memory: `python -m tests.merge_peak ARTIFACTS WORK`.

In bytes beyond what it has when its modules are imported. What the kernel maps of files, and can drop, does not count.
"""

import sys
from pathlib import Path

import accelerate.hooks  # noqa: F401 (what Transformers imports when it first needs it)
import torch
from transformers import Qwen3ForCausalLM  # noqa: F401

from stages.core.contract import StageContext
from stages.kinds.merge.config import MergeConfig
from stages.kinds.merge.run import run
from tests.peak_memory import watched_memory


def main() -> None:
    artifacts, work = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    inputs = {path.name.partition("-")[0]: path for path in artifacts.iterdir()}
    config = MergeConfig(kind="merge", model="base", adapter="tuned")
    with watched_memory() as peak:
        run(config, StageContext(work, "merged", "0" * 12, inputs, {}, work))
    print(peak.added)


if __name__ == "__main__":
    main()
