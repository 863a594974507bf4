"""Lifecycle homes for tests of refreshes with real Prefect and MLflow servers and stand-ins for stage processes."""

import base64
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.servers.lock import Lock
from tests.forked import forked_command, run_forked

ROOT = Path(__file__).parents[2]
LIFECYCLE = Path(sys.executable).with_name("lifecycle")
TINY_REFRESH = ROOT / "tests" / "faults" / "tiny_refresh.py"
PATIENCE_S = 300.0


class Home:
    """Lifecycle home of a test: its environment, and helpers that run commands and send requests in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        named = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "PREFECT_HOME")
        self.environment = {name: value for name, value in os.environ.items() if name not in named}
        self.environment |= {"LIFECYCLE_HOME": str(folder), "PYTHONPATH": str(ROOT)}

    def lifecycle(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([LIFECYCLE, *arguments], env=self.environment, text=True, capture_output=True)

    def lifecycle_beside(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a `lifecycle` command outside the repository, where Python imports the stand-in package `stages`."""
        return subprocess.Popen(
            [LIFECYCLE, *arguments],
            env=self.environment,
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def start(self, recipe: Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, TINY_REFRESH, recipe],
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, recipe: Path) -> tuple[int, dict[str, Any]]:
        return finish(self.start(recipe))

    def recipe(self, name: str, **stages: dict[str, Any]) -> Path:
        path = self.folder.parent / f"{name}.yaml"
        path.write_text(json.dumps({"name": name, "stages": stages}))
        return path

    def copy_to(self, folder: Path) -> None:
        """Copy the folder while servers run, whose databases' journals may go before they are copied."""
        copying = ["cp", "-a", self.folder, folder]
        said = subprocess.run(copying, env={**os.environ, "LC_ALL": "C"}, text=True, capture_output=True).stderr
        assert all(line.endswith("No such file or directory") for line in said.splitlines()), said

    def servers(self) -> dict[str, Any]:
        return json.loads((self.folder / "servers.json").read_text())["servers"]

    def address(self, server: str) -> str:
        return f"http://127.0.0.1:{self.servers()[server]['port']}"

    def key(self) -> str:
        """Return the key NAME:PASSWORD that the lifecycle home's servers require."""
        return (self.folder / "servers.key").read_text().strip()

    def mlflow(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return request(f"{self.address('mlflow')}/api/2.0/mlflow/{path}", body, self.key())

    def prefect(self, path: str, body: dict[str, Any]) -> Any:
        return request(f"{self.address('prefect')}/api/{path}", body, self.key())

    def attempts(self, stage: str) -> list[dict[str, Any]]:
        """Return the MLflow runs of a stage, oldest first; each retry of the stage has a run of its own."""
        wanted = {
            "experiment_ids": ["1"],
            "filter": f"tags.stage = '{stage}'",
            "order_by": ["attributes.start_time ASC"],
        }
        return self.mlflow("runs/search", wanted).get("runs", [])

    def losses(self, run: dict[str, Any]) -> list[int]:
        """Return the training steps for which an MLflow run has a loss, in the order in which they were logged."""
        run_id = run["info"]["run_id"]
        return [
            point["step"]
            for point in self.mlflow(f"metrics/get-history?run_id={run_id}&metric_key=loss").get("metrics", [])
        ]

    def flow_run_state(self, refresh: str) -> str:
        """Return the state type that Prefect shows for a refresh, such as COMPLETED."""
        (flow_run,) = self.prefect("flow_runs/filter", {"flow_runs": {"name": {"any_": [refresh]}}})
        return flow_run["state"]["type"]

    def work(self, stage: str, file: str) -> Path:
        """Wait until a file exists in the work folder of a stage, and return its path."""
        return eventually(lambda: next(self.folder.glob(f"store/.work/*/{stage}-*/{file}"), None))

    def processes(self) -> list[str]:
        """Return the command lines of processes that belong to the lifecycle home, except servers and supervisor."""
        tokens = [server["token"] for server in self.servers().values()]
        supervisor = Lock(self.folder).holder()
        commands = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environment = (process / "environ").read_text()
                command = (process / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            is_server = int(process.name) == supervisor or any(token in environment for token in tokens)
            if str(self.folder) in environment and not is_server:
                commands.append(command)
        return commands


class ForkedHome(Home):
    """A home whose commands are forks of one process that has imported what they need."""

    def lifecycle(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_forked(LIFECYCLE, *arguments, environment=self.environment)

    def start(self, recipe: Path) -> subprocess.Popen[str]:
        """Start a refresh; SIGKILL reaches it when it is sent to this process, and no other signal does."""
        return subprocess.Popen(
            forked_command(str(TINY_REFRESH), str(recipe)),
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, recipe: Path) -> tuple[int, dict[str, Any]]:
        done = run_forked(TINY_REFRESH, recipe, environment=self.environment)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)


def stage(mode: str, mark: str = "*", **environment: str) -> dict[str, Any]:
    """Return a download stage run by `tiny_stage.py` in a mode; another `mark` makes another version."""
    return {
        "kind": "download",
        "dataset": "builtin/addition",
        "files": [mark],
        "execution": {"environment": {"TINY": mode, **environment}},
    }


def model(mode: str, mark: str = "*", **environment: str) -> dict[str, Any]:
    """Return a recipe's download stage whose artifact is a model; its process is the stand-in `tiny_stage.py`."""
    return {**stage(mode, mark, **environment), "dataset": None, "model": "builtin/qwen3-1m"}


def after(upstream: str, mode: str = "ok", **environment: str) -> dict[str, Any]:
    """Return a recipe's evaluate stage for a model; its process is the stand-in `tiny_stage.py`."""
    return {
        "kind": "evaluate",
        "model": upstream,
        "tasks": ["addition"],
        "task_folder": str(ROOT / "configs" / "tasks"),
        "execution": {"environment": {"TINY": mode, **environment}},
    }


def trained(upstream: str, rows: str, mode: str = "ok", **environment: str) -> dict[str, Any]:
    """Return a recipe's train stage on a model and a dataset; its process is the stand-in `tiny_stage.py`."""
    return {
        "kind": "train",
        "method": "sft",
        "model": upstream,
        "data": {"dataset": rows},
        "global_batch_size": 1,
        "learning_rate": 1e-3,
        "execution": {"environment": {"TINY": mode, **environment}},
    }


def every_kind(mode: str, mark: str) -> dict[str, dict[str, Any]]:
    """Return a recipe with a stage of each kind that works on a model, all run by the stand-in `tiny_stage.py`."""
    execution = {"execution": {"environment": {"TINY": mode}}}
    calibration = {"calibration": {"dataset": f"rows-{mark}"}}
    return {
        f"rows-{mark}": stage("steps", mark),
        f"base-{mark}": model(mode, mark),
        f"sft-{mark}": trained(f"base-{mark}", f"rows-{mark}", mode),
        f"awq-{mark}": {"kind": "quantize", "model": f"sft-{mark}", "method": "awq", **calibration, **execution},
        f"scores-{mark}": after(f"awq-{mark}", mode),
    }


def disturb_every_stage(home: Home, mark: str, disturb: Callable[[], None], undo: Callable[[], None]) -> dict[str, Any]:
    """Run a refresh whose stages pause halfway to `disturb`, and go on before `undo`; return the refresh's output."""
    stages = every_kind("pause", mark)
    refresh = home.start(home.recipe(mark, **stages))
    for name in list(stages)[1:]:
        release = home.work(name, "scratch/ready").with_name("release")
        disturb()
        release.touch()
        undo()
    code, done = finish(refresh)
    assert (code, set(states(done).values())) == (0, {"built"}), done
    return done


def check_nothing_was_lost(home: Home, mark: str, done: dict[str, Any]) -> None:
    """Run a refresh again after a fault; all its stages must be cached, and recorded once in Prefect and MLflow."""
    code, again = home.run(home.folder.parent / f"{mark}.yaml")
    assert (code, set(states(again).values())) == (0, {"cached"})
    versions = {name: entry["version"] for name, entry in done["stages"].items()}
    assert {name: entry["version"] for name, entry in again["stages"].items()} == versions
    eventually(lambda: home.flow_run_state(done["refresh"]) == "COMPLETED")
    for name in versions:
        eventually(lambda name=name: [run["info"]["status"] for run in home.attempts(name)] == ["FINISHED"])
        assert [home.losses(run) for run in home.attempts(name)] == [list(range(10))]


def finish(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    """Wait for a `lifecycle` process to end; return its exit code and the JSON object that it printed."""
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert output, errors
    return process.returncode, json.loads(output)


def states(refresh: dict[str, Any]) -> dict[str, str]:
    return {name: entry["state"] for name, entry in refresh["stages"].items()}


def request(url: str, body: Any = None, key: str | None = None, method: str | None = None) -> Any:
    """Send a GET request, or with a body a POST, to a server, and return its JSON answer. key: USER:PASSWORD."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Basic {base64.b64encode(key.encode()).decode()}"
    asked = urllib.request.Request(url, data, headers, method=method)
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def eventually(condition: Callable[[], Any], interval_s: float = 0.05) -> Any:
    """Wait until the condition returns something true, and return that; longer intervals spare the server it asks."""
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end, "it never came about"
        time.sleep(interval_s)
    return found
