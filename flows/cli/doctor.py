"""Checks of `lifecycle doctor`: what this machine has, what a refresh would miss, and what to do about it."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from flows.launch.cluster import CLUSTERS
from flows.launch.local import code_folder
from flows.ledger.home import home
from flows.ledger.machine import gpus, memory_gib, num_cores
from flows.planning.devices import VISIBLE_DEVICES
from flows.servers import local as servers
from flows.servers.programs import NAMED_BY
from stages.core.errors import LifecycleError
from stages.core.shipped import install_command

PYTHONS = ((3, 11), (3, 12))
PIPELINE_PACKAGES = ("torch", "transformers", "datasets", "prefect", "mlflow", "lm_eval", "llmcompressor")
OPTIONAL_PACKAGES = ("megatron-core",)
ASK_TORCH = """
import json, sys, torch
from stages.parallel.accelerator import unseen_devices
print(json.dumps([torch.accelerator.device_count(), unseen_devices(int(sys.argv[1]))]))
"""
"""Program that prints as JSON torch's GPUs and, if none, the problem; its argument: the driver's GPUs."""
SMALLEST_MEMORY_GIB = 4.0
SMALLEST_DISK_GIB = 5.0
SMALLEST_SHARED_MEMORY_GIB = 0.25


@dataclass(frozen=True)
class Finding:
    """Result of one check of the machine, with a remedy if something is wrong; `missing`: no refresh can run."""

    subject: str
    state: Literal["ok", "warning", "missing"]
    found: str
    remedy: str | None = None


def examine() -> list[Finding]:
    """Run all checks of the machine and return their results."""
    checks: tuple[Callable[[], list[Finding]], ...] = (
        _python,
        _cores_and_memory,
        _home,
        _disk,
        _shared_memory,
        _gpus,
        _clusters,
        _pipeline,
        _serving_engines,
        _servers,
    )
    return [finding for check in checks for finding in check()]


def can_run(findings: list[Finding]) -> bool:
    """Return whether a refresh can run here: no check found anything necessary missing."""
    return all(finding.state != "missing" for finding in findings)


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """Return the results of all checks as the object that `lifecycle doctor --json` prints."""
    return {"can_run": can_run(findings), "findings": [asdict(finding) for finding in findings]}


def as_text(findings: list[Finding]) -> str:
    """Return a line for each check's result, with the remedy below it."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<8} {finding.subject:<14} {finding.found}")
        if finding.remedy:
            lines.append(f"{'':<8} {'':<14} → {finding.remedy}")
    lines.append("a run can work here" if can_run(findings) else "a run cannot work here yet")
    return "\n".join(lines)


def _python() -> list[Finding]:
    found = f"{sys.version.split()[0]} ({sys.executable})"
    if sys.version_info[:2] in PYTHONS:
        return [Finding("python", "ok", found)]
    return [Finding("python", "missing", found, "install Python 3.11 or 3.12, and create the environments with it")]


def _cores_and_memory() -> list[Finding]:
    available, total = memory_gib()
    memory = f"{available:.1f} of {total:.1f} GiB available"
    enough = available >= SMALLEST_MEMORY_GIB
    remedy = None if enough else f"the quickstart needs up to 6 GiB; free some, at least {SMALLEST_MEMORY_GIB:g} GiB"
    return [
        Finding("cores", "ok", str(num_cores())),
        Finding("memory", "ok" if enough else "warning", memory, remedy),
    ]


def _home() -> list[Finding]:
    """Check by writing a file that the lifecycle home is writable, since permissions do not show a read-only mount."""
    try:
        with tempfile.TemporaryFile(dir=_existing()):
            return [Finding("home", "ok", str(home()))]
    except OSError as error:
        remedy = "set LIFECYCLE_HOME to a folder that you may write to"
        return [Finding("home", "missing", f"{home()} cannot be written to: {error.strerror}", remedy)]


def _existing() -> Path:
    """Return the lifecycle home, or its closest parent that exists."""
    return next(folder for folder in (home(), *home().parents) if folder.exists())


def _disk() -> list[Finding]:
    existing = _existing()
    free_gib = shutil.disk_usage(existing).free / 2**30
    found = f"{free_gib:.1f} GiB free in {home()}"
    if free_gib >= SMALLEST_DISK_GIB:
        return [Finding("disk", "ok", found)]
    return [Finding("disk", "warning", found, "`lifecycle gc`, or set LIFECYCLE_HOME to a folder on a larger disk")]


def _shared_memory() -> list[Finding]:
    folder = Path("/dev/shm")  # noqa: S108 (where POSIX shared memory lies)
    free_gib = shutil.disk_usage(folder).free / 2**30 if folder.exists() else 0.0
    found = f"{free_gib:.2f} GiB free in {folder}"
    if free_gib >= SMALLEST_SHARED_MEMORY_GIB:
        return [Finding("shared memory", "ok", found)]
    return [Finding("shared memory", "warning", found, "give the container more, as in `docker run --shm-size 1g`")]


def _gpus() -> list[Finding]:
    """Check that torch sees the GPUs that the driver lists."""
    names = gpus()
    if not names:
        return [Finding("GPUs", "ok", "none: everything runs on the CPU")]
    asked = [sys.executable, "-c", ASK_TORCH, str(len(names))]
    done = subprocess.run(asked, cwd=code_folder(), capture_output=True, text=True, check=False)
    if done.returncode:
        problem = f"{', '.join(names)}; asking torch for them failed: {(done.stderr.strip() or '-').splitlines()[-1]}"
        return [Finding("GPUs", "missing", problem, install_command("pipeline"))]
    # Libraries may print lines of their own before it.
    number, unseen = json.loads(done.stdout.splitlines()[-1])
    if unseen:
        return [Finding("GPUs", "missing", *unseen)]
    found = f"{', '.join(names)}; torch sees {number}"
    if number < len(names):
        return [Finding("GPUs", "warning", found, f"unset {VISIBLE_DEVICES} if refreshes may use all")]
    return [Finding("GPUs", "ok", found)]


def _clusters() -> list[Finding]:
    """List the clusters that this machine can submit to; a refresh needs none."""
    ways_in = {launcher: cluster.way_in() for launcher, cluster in CLUSTERS.items()}
    return [Finding(launcher, "ok", way_in) for launcher, way_in in ways_in.items() if way_in]


def _pipeline() -> list[Finding]:
    versions = {package: _version(package) for package in (*PIPELINE_PACKAGES, *OPTIONAL_PACKAGES)}
    missing = [package for package in PIPELINE_PACKAGES if versions[package] is None]
    found = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
    if missing:
        return [Finding("pipeline", "missing", f"{found}; without {', '.join(missing)}", install_command("pipeline"))]
    return [Finding("pipeline", "ok", found)]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _serving_engines() -> list[Finding]:
    from stages.serving.registry import DEFAULT_ENGINE, ENGINES

    findings = []
    for name, engine in ENGINES.items():
        try:
            program = engine.find_program()
        except LifecycleError as error:
            state: Literal["warning", "missing"] = "missing" if name == DEFAULT_ENGINE else "warning"
            findings.append(Finding(name, state, str(error), engine.installation))
        else:
            findings.append(Finding(name, "ok", f"{program.version} ({program.command})"))
    return findings


def _servers() -> list[Finding]:
    return [_server(status) for status in servers.status()]


def _server(status: servers.ServerStatus) -> Finding:
    if status.healthy:
        return Finding(status.name, "ok", f"answers at {status.url}")
    if status.ours:
        starter = "lifecycle run" if status.name in NAMED_BY else "lifecycle up"
        return Finding(status.name, "ok", f"not running; `{starter}` starts it")
    variable = NAMED_BY[status.name]
    return Finding(status.name, "missing", f"{status.url} does not answer", f"start it, or unset {variable}")
