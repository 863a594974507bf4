"""Lifecycle home whose worker runs scheduled refreshes, with stand-ins for the stage processes."""

import json
import os
import shlex
import signal
import sqlite3
import urllib.error
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from refreshes import ForkedHome, eventually, request

from flows.ledger.record import RefreshRecord
from flows.ledger.refreshes import Ledger
from tests.forked import forked_command, run_forked

STAND_IN = Path(__file__).with_name("stand_in")
HOUR = 3 if 9 <= datetime.now(ZoneInfo("Europe/Berlin")).hour < 21 else 15
"""Hour at which scheduled recipes are due, at least six hours from now: in the tests, nothing is due by itself."""
NIGHTLY = f"0 {HOUR} * * *"
POLL_S = 0.25
"""Seconds between questions to Prefect's server, each of which takes it some milliseconds."""


class WorkerHome(ForkedHome):
    forks_refreshes = False
    """True when refreshes that `start_now` starts are forks of a process that has imported what they need."""

    def write(self, name: str, stages: dict[str, dict[str, Any]], **fields: Any) -> Path:
        """Write a recipe whose stages run as the stand-in `tiny_stage.py`, also when the worker starts them."""
        for stage in stages.values():
            stage["execution"]["environment"]["PYTHONPATH"] = str(STAND_IN)
        path = self.folder.parent / f"{name}.yaml"
        path.write_text(json.dumps({"name": name, **fields, "stages": stages}))
        return path

    def schedule(self, recipe: Path, cron: str = NIGHTLY) -> dict[str, Any]:
        done = self.lifecycle("schedule", str(recipe), "--cron", cron, "--timezone", "Europe/Berlin", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["schedules"][0]

    def prefect(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """Send a request to Prefect's API, repeatedly while it answers 503 because its database is locked."""

        def answer() -> list[Any]:
            try:
                return [request(f"{self.address('prefect')}/api/{path}", body, self.key(), method)]
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise
                return []

        return eventually(answer)[0]

    def deployment(self, name: str) -> dict[str, Any]:
        return self.prefect(f"deployments/name/refresh/{name}")

    def start_now(self, name: str, state: str = "SCHEDULED", **parameters: Any) -> str:
        """Start a scheduled recipe now with other parameters, as Prefect's UI can, and return the flow run's id."""
        deployment = self.deployment(name)
        body: dict[str, Any] = {"parameters": {**deployment["parameters"], **parameters}, "state": {"type": state}}
        if self.forks_refreshes:
            body["job_variables"] = {"command": shlex.join(forked_command("-m", "prefect.engine"))}
        return self.prefect(f"deployments/{deployment['id']}/create_flow_run", body)["id"]

    def planned(self, name: str) -> list[dict[str, Any]]:
        """Return a recipe's flow runs that Prefect's scheduler has planned and that have not begun."""
        wanted = {
            "deployments": {"id": {"any_": [self.deployment(name)["id"]]}},
            "flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}},
        }
        return self.prefect("flow_runs/filter", wanted)

    def miss_nights(self, name: str, count: int | None = None, planned_days_ago: int = 0) -> list[str]:
        """Move up to `count` of a recipe's planned runs to past nights in Prefect's database; return their ids."""
        runs = [run["id"] for run in eventually(lambda: self.planned(name))][:count]
        with sqlite3.connect(self.folder / "prefect" / "prefect.db", timeout=60) as connection:
            for nights_ago, run in enumerate(runs, start=1):
                missed = datetime.now(UTC) - timedelta(days=nights_ago)
                column, due = f"{missed:%Y-%m-%d %H:%M:%S.%f}", "expected_start_time = ?, next_scheduled_start_time = ?"
                connection.execute(f"UPDATE flow_run SET {due} WHERE id = ?", (column, column, run))
                details = "state_details = json_set(state_details, '$.scheduled_time', ?)"
                planned = f"{datetime.now(UTC) - timedelta(days=planned_days_ago):%Y-%m-%d %H:%M:%S.%f}"
                dated = (missed.isoformat(), planned, run)
                states = f"UPDATE flow_run_state SET {details}, timestamp = ? WHERE flow_run_id = ?"
                connection.execute(states, dated)
        return runs

    def press_retry(self, flow_run: str) -> None:
        """Set a flow run's state as the Retry button in Prefect's UI does."""
        state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retried from the UI"}
        answer = self.prefect(f"flow_runs/{flow_run}/set_state", {"state": state})
        assert answer["status"] == "ACCEPT", answer

    def heartbeat(self, flow_run: str) -> None:
        """Send Prefect a heartbeat event of a flow run, as the run's process does when heartbeats are enabled."""
        event = {
            "id": str(uuid.uuid4()),
            "event": "prefect.flow-run.heartbeat",
            "occurred": datetime.now(UTC).isoformat(),
            "resource": {"prefect.resource.id": f"prefect.flow-run.{flow_run}"},
        }
        self.prefect("events", [event])

    def flow_run(self, flow_run: str) -> dict[str, Any]:
        return self.prefect(f"flow_runs/{flow_run}")

    def logs(self, flow_run: str) -> str:
        """Return the log messages of a flow run that Prefect has stored."""
        wanted = {"logs": {"flow_run_id": {"any_": [flow_run]}}}
        return "\n".join(line["message"] for line in self.prefect("logs/filter", wanted))

    def ended(self, flow_run: str, num_tries: int = 1) -> dict[str, Any]:
        """Wait until a flow run has ended after `num_tries` starts (0: it never began), and return it."""

        def ended_run() -> dict[str, Any] | None:
            run = self.flow_run(flow_run)
            final = run["state"]["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
            return run if final and run["run_count"] >= num_tries else None

        return eventually(ended_run, POLL_S)

    def run_now(self, name: str, **parameters: Any) -> dict[str, Any]:
        return self.ended(self.start_now(name, **parameters))

    def states(self, flow_run: dict[str, Any]) -> dict[str, str]:
        """Return the states of a refresh's stages from its ledger (event log)."""
        return {name: entry.state for name, entry in self.record(flow_run).stages.items()}

    def task_states(self, flow_run: dict[str, Any]) -> dict[str, tuple[str, str]]:
        """Wait until all tasks of a flow run have ended; return state type and state name of each."""

        def ended() -> dict[str, tuple[str, str]] | None:
            runs = self.prefect("task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run["id"]]}}})
            states = {run["name"]: (run["state_type"], run["state_name"]) for run in runs}
            return states if all(kind in ("COMPLETED", "FAILED", "CANCELLED") for kind, _ in states.values()) else None

        return eventually(ended, POLL_S)

    def record(self, flow_run: dict[str, Any]) -> RefreshRecord:
        return Ledger(self.folder / "ledger" / flow_run["name"]).read()

    def python(self, code: str, **variables: str) -> str:
        """Run Python code as a client of Prefect's server, and return what it prints."""
        program = self.folder.parent / "code.py"
        program.write_text(code)
        api = {"PREFECT_API_URL": f"{self.address('prefect')}/api", "PREFECT_API_AUTH_STRING": self.key()}
        done = run_forked(program, environment={**self.environment, **api, **variables})
        assert done.returncode == 0, done.stderr
        return done.stdout

    def kill_refresh(self, flow_run: str) -> None:
        """Kill the process of a refresh with SIGKILL."""
        record = self.record(self.flow_run(flow_run))
        os.kill(record.process.pid, signal.SIGKILL)
