"""Run a merge stage and print its peak memory: `python -m tests.merge_peak ARTIFACTS WORK`.

In bytes beyond what it has when its modules are imported. What the kernel maps of files, and can drop, does not count.
"""

import re
import sys
import threading
from pathlib import Path

import accelerate.hooks  # noqa: F401 (what Transformers imports when it first needs it)
import torch
from transformers import Qwen3ForCausalLM  # noqa: F401

from stages.core.contract import StageContext
from stages.kinds.merge.config import MergeConfig
from stages.kinds.merge.run import run

INTERVAL_S = 0.002


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", status)[1])


def main() -> None:
    artifacts, work = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    before, most, ended = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(INTERVAL_S):
            most = max(most, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    inputs = {path.name.partition("-")[0]: path for path in artifacts.iterdir()}
    config = MergeConfig(kind="merge", model="base", adapter="tuned")
    run(config, StageContext(work, "merged", "0" * 12, inputs, {}, work))
    ended.set()
    watcher.join()
    print(most - before)


if __name__ == "__main__":
    main()
