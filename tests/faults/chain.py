"""Pipeline run of five chained stand-in stages, without Prefect and MLflow, for tests of killed processes.

A step that is lost, or done twice, changes the bytes of its artifact and all after it.

python chain.py STORE         runs the refresh; prints what became of each stage as JSON, or the error
python chain.py --stage WORK  a stage's process (or one of its ranks)
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

NUM_STEPS = 8
STEP_S = 0.1
HELD = "CHAIN_HELD"
"""Environment variable with `STAGE=FILE`, which makes a stand-in stage wait halfway until the file exists."""
FULL_DISK = 8  # the exit code of ResourceError
STAGES = ("base", "rows", "sft", "awq", "scores")


def run_stage_process(work: Path) -> None:
    """Run a stage that hashes its inputs, with a checkpoint after each step; other ranks only wait for rank 0."""
    stage_input = json.loads((work / "config.json").read_text())
    checkpoint = work / "scratch" / "checkpoint.json"
    if os.environ.get("RANK", "0") != "0":
        while not (work / "result.json").exists():
            time.sleep(0.05)
        return
    contents = [
        path.read_text()
        for name in sorted(stage_input["inputs"])
        for path in _contents(Path(stage_input["inputs"][name]))
    ]
    start = {"step": 0, "hash": hashlib.sha256("".join([stage_input["kind"], *contents]).encode()).hexdigest()}
    state = json.loads(checkpoint.read_text()) if checkpoint.exists() else start
    first_step = state["step"]
    checkpoint.parent.mkdir(exist_ok=True)
    held, _, release = os.environ.get(HELD, "").partition("=")
    while state["step"] < NUM_STEPS:
        time.sleep(STEP_S)
        while state["step"] == NUM_STEPS // 2 and held == stage_input["name"] and not Path(release).exists():
            time.sleep(STEP_S)
        state = {"step": state["step"] + 1, "hash": hashlib.sha256(state["hash"].encode()).hexdigest()}
        with (work / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps({"step": state["step"], "time_ms": 0, "loss": 1.0}) + "\n")
        partial = checkpoint.with_suffix(".partial")
        partial.write_text(json.dumps(state))
        partial.replace(checkpoint)
    folder = work / (
        "data" if stage_input["name"] == "rows" else "model" if stage_input["name"] != "scores" else "scores"
    )
    folder.mkdir()
    (folder / "content").write_text(state["hash"])
    if folder.name == "data":  # a plan reads the first rows of a dataset that is there
        (folder / "train.jsonl").write_text('{"prompt": "1+1", "completion": "2"}\n')
    (work / "result.json").write_text(json.dumps({"metrics": {"first_step": float(first_step)}}))


def _contents(artifact: Path) -> list[Path]:
    return sorted(artifact.glob("*/content"))


def recipe(ranks: int) -> dict[str, dict[str, object]]:
    """Return a quickstart-like recipe of two downloads, training on so many ranks, quantization, evaluation."""
    execution = {"execution": {"threads": 1}}
    return {
        "base": {"kind": "download", "model": "builtin/qwen3-1m", **execution},
        "rows": {"kind": "download", "dataset": "builtin/addition", **execution},
        "sft": {
            "kind": "train",
            "method": "sft",
            "model": "base",
            "data": {"dataset": "rows"},
            "global_batch_size": 2,
            "learning_rate": 1e-3,
            "layout": {"dp_shard": ranks},
            **execution,
        },
        "awq": {"kind": "quantize", "model": "sft", "method": "awq", "calibration": {"dataset": "rows"}, **execution},
        "scores": {"kind": "evaluate", "model": "awq", "tasks": ["addition"], **execution},
    }


def run_refresh(root: Path, ranks: int = 1) -> dict[str, dict[str, object]]:
    """Run the five stand-in stages in order, through the real runner, store and supervisor."""
    import tiny

    from flows.launch import local
    from flows.running.runner import run_stage
    from flows.store.store import Store
    from stages.core.supervised import SupervisedProcess

    def launch(work, config):
        command = local.command(work, config)[: -len(["-m", "stages", str(work)])]
        with (work / "log.txt").open("ab") as log:
            command += [__file__, "--stage", str(work)]
            return SupervisedProcess(command, environment=local.environment(config), output=log, grace_s=1.0)

    store = Store(root)
    built = {}
    for name, planned in tiny.planned_stages(store, recipe(ranks)).items():
        built[name] = run_stage(planned, built, store, tiny.Notes(), launch=launch)
    return {
        name: {"state": one.state, "version": one.version, "digest": one.record.digest, **one.metrics}
        for name, one in built.items()
    }


def start(root: Path, ranks: int = 1, held: str = "", release: Path = Path("/nonexistent")) -> subprocess.Popen[str]:
    """Start the five-stage refresh in a process; the stage `held` waits halfway until the file `release` exists."""
    command = [sys.executable, __file__, str(root), str(ranks)]
    environment = {**os.environ, HELD: f"{held}={release}"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(refresh: subprocess.Popen[str]) -> dict[str, dict[str, object]]:
    """Wait for a refresh to succeed, and return state, version and digest of its stages."""
    said, errors = refresh.communicate(timeout=300)
    assert refresh.returncode == 0, errors
    return json.loads(said)


def identities(refresh: dict[str, dict[str, object]]) -> dict[str, tuple[object, object]]:
    """Return version and content digest of each stage's artifact; faults during the refresh must not change them."""
    return {name: (stage["version"], stage["digest"]) for name, stage in refresh.items()}


def step_of(root: Path, stage: str) -> int:
    """Return the step of a stage's last checkpoint; 0 if it has none."""
    checkpoint = next(root.glob(f".work/*/{stage}-*/scratch/checkpoint.json"), None)
    return json.loads(checkpoint.read_text())["step"] if checkpoint else 0


if __name__ == "__main__":
    if sys.argv[1] == "--stage":
        try:
            run_stage_process(Path(sys.argv[2]))
        except OSError:
            sys.exit(FULL_DISK)
    else:
        print(json.dumps(run_refresh(Path(sys.argv[1]), int(sys.argv[2]))))
