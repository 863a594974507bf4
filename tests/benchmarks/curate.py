"""Benchmark of the curate stage: recall and precision on planted near-duplicates, time and memory.

`python tests/benchmarks/curate.py [NUM_ROWS]` (default 20,000) prints rows, seconds, peak memory, recall and precision.
"""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from stages.core.contract import StageContext  # noqa: E402
from stages.kinds.curate.config import CurateConfig  # noqa: E402
from stages.kinds.curate.run import run  # noqa: E402
from tests.planted_rows import planted_duplicates  # noqa: E402

STEPS = {"length": {"min_characters": 10}, "exact_duplicates": True, "near_duplicates": {}}


def main() -> None:
    """Write rows with planted near-duplicates, curate them, and print recall, precision, time and memory."""
    planted = planted_duplicates(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
    config = CurateConfig.model_validate({"kind": "curate", "datasets": ["mine"], **STEPS})
    with tempfile.TemporaryDirectory() as name:
        folder, work = Path(name) / "mine", Path(name) / "work"
        (folder / "data").mkdir(parents=True)
        work.mkdir()
        with (folder / "data" / "train.jsonl").open("w") as stream:
            stream.writelines(json.dumps({"text": text}) + "\n" for text in planted.texts)
        start_s = time.perf_counter()
        run(config, StageContext(work, "clean", "0" * 12, {"mine": folder}, {}, Path(name)))
        seconds = time.perf_counter() - start_s
        dropped = {json.loads(line)["line"] - 1 for line in (work / "dropped.jsonl").open()}
    num_right = len(dropped & planted.copies.keys())
    print(f"{len(planted.texts):,} rows in {seconds:.1f} s ({len(planted.texts) / seconds:,.0f} rows/s)")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    print(f"near-duplicates: recall {num_right / len(planted.copies):.3f}, precision {num_right / len(dropped):.3f}")


if __name__ == "__main__":
    main()
