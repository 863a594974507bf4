"""How much memory a training stage takes to prepare a large JSONL dataset and to learn from it.

`python tests/benchmarks/data_memory.py [GB …]` prints the peak of its processes for each size; it is flat when the
lines show about the same. A dataset is one shard of text, linked many times: what is tokenized is kept by content, so
that all of it is hashed, packed, written and compared, but tokenized once.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stages.hubs.builtin import qwen3
from tests.train_stage import make_config, make_context, start

DEFAULT_GB = (0.5, 2.0)
SHARD_BYTES = 20_000_000
WORDS_OF_ROW = 150
"""About a kilobyte."""
POLL_S = 0.02


def write_shard(path: Path) -> None:
    """Rows of text, none like the other."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(5000)]
    with path.open("w") as stream:
        while stream.tell() < SHARD_BYTES:
            stream.write(json.dumps({"text": " ".join(draw.choices(words, k=WORDS_OF_ROW))}) + "\n")


def peak_memory_mib(process: subprocess.Popen[bytes]) -> float:
    """Of the largest of a process and those below it, until it ends; what files hold in memory is not counted."""
    peak_kib = 0
    while process.poll() is None:
        peak_kib = max(peak_kib, *map(anonymous_kib, [process.pid, *children(process.pid)]))
        time.sleep(POLL_S)
    return peak_kib / 1024


def children(pid: int) -> list[int]:
    """All below a process."""
    try:
        found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return found + [below for child in found for below in children(child)]


def anonymous_kib(pid: int) -> int:
    """Of its own; 0 of a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def main() -> None:
    """Measure every size named on the command line."""
    sizes = [float(argument) for argument in sys.argv[1:]] or DEFAULT_GB
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifacts = {"base": folder / "base", "texts": folder / "texts"}
        (artifacts["base"] / "model").mkdir(parents=True)
        (artifacts["texts"] / "data" / "train").mkdir(parents=True)
        qwen3.make(artifacts["base"] / "model")
        write_shard(folder / "shard.jsonl")
        data = {"dataset": "texts", "format": "text", "sequence_length": 2048}
        config = make_config(data=data, steps=3)
        for number, size_gb in enumerate(sizes):
            for shard in range(round(size_gb * 1e9 / SHARD_BYTES)):
                path = artifacts["texts"] / "data" / "train" / f"{shard:05}.jsonl"
                if not path.exists():
                    os.link(folder / "shard.jsonl", path)
            work = folder / f"work-{number}"
            make_context(work, artifacts, config)
            begin_s = time.perf_counter()
            process = start(work, config)
            peak_mib = peak_memory_mib(process)
            assert process.returncode == 0, (work / "log.txt").read_text()[-4000:]
            seconds = time.perf_counter() - begin_s
            print(f"{size_gb:6.1f} GB: at most {peak_mib:,.0f} MiB a process, {seconds:,.0f} s", flush=True)


if __name__ == "__main__":
    main()
