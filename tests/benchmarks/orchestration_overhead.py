"""Benchmark of orchestration overhead: a refresh whose stages only sleep, and a nightly refresh with nothing new.

python tests/benchmarks/orchestration_overhead.py

Servers, worker and stage processes are real; overhead is the refresh's time beyond its longest path of sleep.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))
from refreshes import after, model, stage
from worker_home import WorkerHome

HOUR_S = 3600.0
SLEEP_S = 20.0
LONGEST_PATH = 4
"""Number of stages on the longest dependency path of the recipe: base, sft, awq, scores."""


def sleeping_stages() -> dict[str, dict[str, Any]]:
    """Return a quickstart-like recipe whose stages only sleep: two downloads, training, quantization, evaluation."""
    asleep = {"TINY_SECONDS": str(SLEEP_S)}
    return {
        "base": model("ok", **asleep),
        "rows": stage("ok", **asleep),
        "sft": {
            "kind": "train",
            "method": "sft",
            "model": "base",
            "data": {"dataset": "rows"},
            "global_batch_size": 1,
            "learning_rate": 1e-3,
            "execution": {"environment": {"TINY": "ok", **asleep}},
        },
        "awq": {
            "kind": "quantize",
            "model": "sft",
            "method": "awq",
            "calibration": {"dataset": "rows"},
            "execution": {"environment": {"TINY": "ok", **asleep}},
        },
        "scores": after("awq", **asleep),
    }


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    began_s = time.perf_counter()
    result = run()
    return time.perf_counter() - began_s, result


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        home = WorkerHome(Path(folder) / "home")
        try:
            home.schedule(home.write("asleep", sleeping_stages()))
            seconds, built = timed(lambda: home.run_now("asleep"))
            assert set(home.states(built).values()) == {"built"}, home.record(built)
            overhead_s = seconds - LONGEST_PATH * SLEEP_S
            print(f"refresh of {len(sleeping_stages())} stages that sleep: {seconds:.1f} s as a scheduled run")
            print(f"overhead: {overhead_s:.1f} s, {overhead_s / HOUR_S:.2%} of a refresh of one hour")
            seconds, cached = timed(lambda: home.run_now("asleep"))
            assert cached["state"]["name"] == "Cached"
            at_work_s = cached["total_run_time"]
            print(f"nothing new: {seconds:.1f} s from being due to its end, {at_work_s:.1f} s of it at work")
        finally:
            home.lifecycle("down")


if __name__ == "__main__":
    main()
