"""Lifecycle home that refreshes a model every night on a simulated clock, set up as an operator would."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))

import year_engine
from refreshes import LIFECYCLE, ROOT
from worker_home import WorkerHome
from year_clock import Clock
from year_kills import processes
from year_world import API_KEY

from stages.core.errors import NotPromotedError

NAME = "adder"
CRON, ZONE = "30 2 * * *", "Europe/Berlin"
"""Schedule of the nightly refresh; daylight saving time skips this time once a year and repeats it once."""
PATIENCE_S = 180.0
STAND_IN = Path(__file__).with_name("year_stand_in")


class YearHome(WorkerHome):
    """Lifecycle home on a fake clock, with training rows, base model and recipe in the folder above it."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        super().__init__(folder)
        self.clock = clock
        self.environment |= clock.environment
        self.environment["VLLM_API_KEY"] = API_KEY
        # Prefect deletes events that are a week old once an hour by the machine's own time; a week here takes minutes.
        self.environment["PREFECT_SERVER_SERVICES_DB_VACUUM_LOOP_SECONDS"] = "30"
        self.environment["LIFECYCLE_VLLM"] = str(folder.parent / "vllm" / "bin" / "vllm")
        self.rows = folder.parent / "rows"
        self.recipe_file = folder.parent / f"{NAME}.yaml"

    def prepare(self) -> None:
        """Write the base model, the first training rows, the recipe, and the stand-in for vLLM."""
        self.rows.mkdir()
        self.add_rows(0)
        base = self.folder.parent / "base"
        # Elsewhere: what torch leaves in its folder for temporary files is not the home's.
        make = f"from tests.serving import make_model; from pathlib import Path; make_model(Path({str(base)!r}))"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.folder.parent)}
        subprocess.run([sys.executable, "-c", make], env=environment, check=True, capture_output=True)
        self.recipe_file.write_text(json.dumps(recipe(self.folder.parent)))
        year_engine.install(self.folder.parent / "vllm")

    def begin(self, webhook: str, keep: dict[str, Any]) -> None:
        """Start the servers of the simulated year, and configure retention, notifications and the nightly schedule."""
        self.folder.mkdir()
        (self.folder / "retention.yaml").write_text(json.dumps({"keep": keep}))
        self.does("up")
        self.environment["YEAR_WEBHOOK"] = webhook
        every = ("failed", "not-promoted", "promoted")
        self.does("notify", "add", "webhook", "--url-from", "YEAR_WEBHOOK", *(f"--on={state}" for state in every))
        self.does("schedule", str(self.recipe_file), "--cron", CRON, "--timezone", ZONE)

    def refresh(self) -> str:
        """Run the recipe by hand, and return the refresh's name. A model that is not promoted counts as success."""
        done = self.does("run", str(self.recipe_file), "--json", codes=(0, NotPromotedError.exit_code))
        return json.loads(done)["refresh"]

    def does(self, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
        """Run a `lifecycle` command, check that its exit code is one of `codes`, and return its output."""
        # Elsewhere than in this repository, where stages find its `stages` before those on their PYTHONPATH.
        command = [LIFECYCLE, *arguments]
        done = subprocess.run(command, env=self.environment, cwd=self.folder.parent, text=True, capture_output=True)
        assert done.returncode in codes, f"lifecycle {' '.join(arguments)}: {done.stderr}{done.stdout}"
        return done.stdout

    def add_rows(self, night: int) -> None:
        row = {"prompt": f"What is {night} + 1?", "completion": str(night + 1)}
        (self.rows / f"train-{night:03}.jsonl").write_text(json.dumps(row) + "\n")

    def next_due(self) -> datetime:
        """Return the time at which Prefect will start the next refresh."""
        wanted = {
            "deployments": {"name": {"any_": [NAME]}},
            "flow_runs": {
                "state": {"type": {"any_": ["SCHEDULED"]}},
                "expected_start_time": {"after_": self.clock.now().isoformat()},
            },
            "sort": "EXPECTED_START_TIME_ASC",
            "limit": 1,
        }

        def planned() -> list[dict[str, Any]]:
            with contextlib.suppress(OSError):
                return self.prefect("flow_runs/filter", wanted)
            return []

        (run,) = until(planned, "a refresh is planned")
        return datetime.fromisoformat(run["expected_start_time"])

    def unfinished(self) -> list[str]:
        """Return a line for each refresh that runs or is due within the hour; none if the lifecycle home is idle."""
        soon = (self.clock.now() + timedelta(hours=1)).isoformat()
        busy = {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}
        due = {"state": {"type": {"any_": ["SCHEDULED"]}}, "next_scheduled_start_time": {"before_": soon}}
        try:
            runs = [run for which in (busy, due) for run in self.prefect("flow_runs/filter", {"flow_runs": which})]
        except OSError as error:
            return [f"Prefect does not answer: {error}"]
        processes_of_flows = [f"process {pid}" for pid in processes(str(self.folder), "flow")]
        return [*(f"{run['name']} is {run['state']['name']}" for run in runs), *processes_of_flows]

    def is_quiet(self) -> bool:
        return not self.unfinished()

    def versions(self) -> dict[str, str]:
        """Return the weights' SHA-256 of each registered model version by number, if its artifact is still stored."""
        versions = self.mlflow("model-versions/search?max_results=10000").get("model_versions", [])
        models = {version["version"]: {tag["key"]: tag["value"] for tag in version["tags"]} for version in versions}
        weights = {number: self.weights_of(tags["lifecycle.model"]) for number, tags in models.items()}
        return {number: sha256 for number, sha256 in weights.items() if sha256}

    def weights_of(self, key: str) -> str | None:
        """Return the recorded SHA-256 of the weights of an artifact KIND/VERSION; None if the artifact is gone."""
        kind, version = key.split("/")
        file = next((self.folder / "store" / kind).glob(f"*-{version}/record.json"), None)
        return json.loads(file.read_text())["files"]["model/model.safetensors"]["sha256"] if file else None


def recipe(folder: Path) -> dict[str, Any]:
    """Return the recipe of the simulated year: real downloads and promotion, stand-ins for training and evaluation."""
    made_up = {"execution": {"environment": {"PYTHONPATH": str(STAND_IN)}}}
    return {
        "name": NAME,
        "stages": {
            "base": {"kind": "download", "model": f"file://{folder}/base"},
            "rows": {"kind": "download", "dataset": f"file://{folder}/rows"},
            "sft": {
                "kind": "train",
                "method": "sft",
                "model": "base",
                "data": {"dataset": "rows"},
                "global_batch_size": 8,
                "learning_rate": 1e-3,
                **made_up,
            },
            "scores": {
                "kind": "evaluate",
                "model": "sft",
                "tasks": ["addition"],
                "task_folder": str(ROOT / "configs" / "tasks"),
                **made_up,
            },
            "promote": {"kind": "promote", "name": NAME, "model": "sft", "evaluations": ["scores"]},
        },
    }


def until(condition: Callable[[], Any], what: str | Callable[[], str], timeout_s: float = PATIENCE_S) -> Any:
    """Wait until a condition is true, and return its value; fail with a message about `what` after `timeout_s`."""
    end_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end_s, f"not within {timeout_s:.0f} s: {what() if callable(what) else what}"
        time.sleep(0.05)
    return found
