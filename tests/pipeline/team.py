"""Services of `deploy/compose.yaml` run as local processes, with the file's commands, settings and secrets."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from postgresql import USER, PostgreSql
from refreshes import ROOT, eventually

from tests.slurm_cluster import free_ports

COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
SERVICES = ("prefect", "mlflow", "worker")


class Team:
    """A team's servers from `deploy/compose.yaml` as local processes, with other host names, ports and folders."""

    def __init__(self, folder: Path, database: PostgreSql) -> None:
        self.folder = folder
        self.password = secrets.token_hex(16)
        self.ports = dict(zip(SERVICES, free_ports(3), strict=True))
        self._processes: list[subprocess.Popen[bytes]] = []
        database.create(["team_prefect", "team_mlflow"])
        for name in ("secrets", "artifacts", "home", "tmp"):
            (folder / name).mkdir(mode=0o700)
        for name, text in {
            "servers_key": f"lifecycle:{self.password}\n",
            "postgres_password": f"{database.password}\n",
            "hub_token": "",
        }.items():
            self.secret(name).write_text(text)
            self.secret(name).chmod(0o400)
        here = {
            "0.0.0.0:4200": f"127.0.0.1:{self.ports['prefect']}",
            "0.0.0.0:5000": f"127.0.0.1:{self.ports['mlflow']}",
            "//lifecycle@postgres:5432/": f"//{USER}@127.0.0.1:{database.port}/team_",
            "localhost:8080": f"localhost:{self.ports['worker']}",
            "/run/secrets": f"{folder}/secrets",
            "/artifacts": f"{folder}/artifacts",
            "/lifecycle": f"{folder}/home",
            "/tmp": f"{folder}/tmp",
            **{
                f"{name}:{port}": f"localhost:{self.ports[name]}"
                for name, port in (("prefect", 4200), ("mlflow", 5000))
            },
            **{f"{name}:4200": f"{name}:{self.ports['prefect']}" for name in ("localhost", "127.0.0.1")},
            **{f"{name}:5000": f"{name}:{self.ports['mlflow']}" for name in ("localhost", "127.0.0.1")},
        }
        text = json.dumps({name: COMPOSE["services"][name] for name in SERVICES})
        text = re.sub("|".join(map(re.escape, here)), lambda found: here[found[0]], text)
        self.services: dict[str, Any] = json.loads(text)

    def secret(self, name: str) -> Path:
        """Return the path of the file that holds a secret of the compose file."""
        return self.folder / "secrets" / name

    def start(self) -> None:
        """Start the services in the compose file's order, each when the former one is healthy."""
        for name in SERVICES:
            service = self.services[name]
            with self.log(name).open("wb") as log:
                process = subprocess.Popen(
                    _command(service["command"]),
                    env={**self._environment(), **service["environment"]},
                    cwd=self.folder,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self._processes.append(process)
            eventually(lambda: self._is_healthy(name, process), interval_s=1)  # noqa: B023

    def stop(self) -> None:
        for process in reversed(self._processes):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(120)

    def _is_healthy(self, name: str, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, self.log(name).read_text()
        command = _command(self.services[name]["healthcheck"]["test"][1:])
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def address(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def _environment(self) -> dict[str, str]:
        """Return the environment variables that the container image sets, with a free port for the worker."""
        port = {"PREFECT_WORKER_WEBSERVER_PORT": str(self.ports["worker"])}
        return {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "DO_NOT_TRACK": "true", **port}


def _command(words: list[str]) -> list[str]:
    return [sys.executable if word == "python" else word for word in words]
