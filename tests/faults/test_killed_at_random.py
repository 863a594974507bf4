"""A refresh of SFT, DPO, quantization and evaluation, one of whose processes is killed every few seconds.

Flow, supervisor, rank, quantizer, vLLM, Prefect or MLflow: whichever lives when the moment comes. As often as it dies
it is run again; in the end every artifact has the version and the bytes of an undisturbed refresh. KILL_SEEDS says how
often that is done: three times in `make faults`, else once.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))
from refreshes import LIFECYCLE, ROOT, Home, eventually

from stages.core.supervisor import living_processes

SEEDS = range(int(os.environ.get("KILL_SEEDS", "1")))
NUM_KILLS = 9
PAUSE_S = (4.0, 14.0)
TIMEOUT_S = 900

ONE_THREAD = {"threads": 1}
TRAINING = {"global_batch_size": 4, "learning_rate": 1e-3, "precision": "fp32", "export_dtype": "float32"}
OFTEN_SAVED = {**ONE_THREAD, "checkpoint_every_steps": 5, "measure_matmul_rate": False}
RECIPE = {
    "base": {"kind": "download", "model": "builtin/qwen3-1m"},
    "problems": {"kind": "download", "dataset": "builtin/addition"},
    "preferences": {"kind": "download", "dataset": "builtin/addition-preferences"},
    "sft": {
        "kind": "train",
        "method": "sft",
        "model": "base",
        "data": {"dataset": "problems", "sequence_length": 64},
        "steps": 60,
        "layout": {"micro_batch_size": 2},
        **TRAINING,
        "execution": OFTEN_SAVED,
    },
    "dpo": {
        "kind": "train",
        "method": "dpo",
        "model": "sft",
        "data": {"dataset": "preferences", "sequence_length": 128},
        "steps": 30,
        "layout": {"dp_shard": 2, "micro_batch_size": 2},
        **TRAINING,
        "execution": OFTEN_SAVED,
    },
    "awq": {
        "kind": "quantize",
        "model": "dpo",
        "method": "awq",
        "group_size": 32,
        "calibration": {"dataset": "problems", "sequence_length": 64},
        "execution": ONE_THREAD,
    },
    "scores": {
        "kind": "evaluate",
        "model": "awq",
        "tasks": ["addition"],
        "task_folder": str(ROOT / "configs" / "tasks"),
        "limit": 40,
        "serving": {"max_model_len": 256, "enforce_eager": True, "kv_cache_memory_gib": 0.0625},
        "execution": {**ONE_THREAD, "retries": 9},
    },
}

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = Home(tmp_path_factory.mktemp("random") / "home")
    home.folder.mkdir()
    assert home.lifecycle("up").returncode == 0
    yield home
    assert home.lifecycle("down").returncode == 0


@pytest.fixture(scope="module")
def recipe(home):
    return home.recipe("refined", **RECIPE)


@pytest.fixture(scope="module")
def undisturbed(home, recipe):
    return finished(start(home, recipe), home)


def start(home: Home, recipe: Path) -> subprocess.Popen[str]:
    log = (home.folder.parent / "refresh.log").open("a")
    command = [LIFECYCLE, "run", str(recipe), "--json"]
    return subprocess.Popen(command, env=home.environment, text=True, stdout=subprocess.PIPE, stderr=log)


def finished(refresh: subprocess.Popen[str], home: Home) -> dict[str, tuple[str, str]] | None:
    """Version and digest of each artifact; None for a refresh that did not end well."""
    said, _ = refresh.communicate(timeout=TIMEOUT_S)
    if refresh.returncode != 0:
        return None
    versions = {name: entry["version"] for name, entry in json.loads(said)["stages"].items()}
    records = {
        name: next(home.folder.glob(f"store/*/{name}-{version}/record.json")) for name, version in versions.items()
    }
    return {name: (versions[name], json.loads(record.read_text())["digest"]) for name, record in records.items()}


def victims(home: Home, refresh: subprocess.Popen[str]) -> dict[str, list[int]]:
    """Processes that live now, by what they are; a server's number is that of its group."""
    found: dict[str, list[int]] = {"flow": [refresh.pid]}
    for name, server in home.servers().items():
        if name in ("prefect", "mlflow"):
            found[name] = [-server["process"]["pid"]]
    store = str(home.folder / "store")
    for pid, (parent, _) in living_processes().items():
        command, variables = read(pid, "cmdline"), read(pid, "environ")
        if str(home.folder) not in variables:
            continue
        if parent == refresh.pid and store in command:
            found.setdefault("supervisor", []).append(pid)
        if "\nRANK=" in variables and "-m\nstages" in command:
            found.setdefault("rank", []).append(pid)
        elif "/awq-" in command and "-m\nstages" in command and parent != refresh.pid:
            found.setdefault("quantizer", []).append(pid)
        elif "vllm" in command:
            found.setdefault("vLLM", []).append(pid)
    return found


def read(pid: int, file: str) -> str:
    """Arguments or variables, one a line; nothing of a process that has ended."""
    try:
        return "\n" + Path(f"/proc/{pid}/{file}").read_text(errors="replace").replace("\0", "\n")
    except OSError:
        return ""


def kill_one(home: Home, refresh: subprocess.Popen[str], chance: random.Random, seldom: Callable[[str], int]) -> str:
    """Kill a process of a kind that was killed least often so far, of those that live; returns the kind."""
    living = victims(home, refresh)
    kind = min(living, key=lambda kind: (seldom(kind), chance.random()))
    pid = chance.choice(living[kind])
    try:
        os.killpg(-pid, signal.SIGKILL) if pid < 0 else os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return "nobody"
    if pid < 0:
        assert home.lifecycle("up").returncode == 0
    return kind


@pytest.mark.parametrize("seed", SEEDS)
def test_a_refresh_that_is_killed_every_few_seconds_ends_with_the_bytes_of_an_undisturbed_one(
    home, recipe, undisturbed, fault, seed
):
    assert undisturbed, (home.folder.parent / "refresh.log").read_text()[-4000:]
    eventually(lambda: home.processes() == [])
    shutil.rmtree(home.folder / "store")
    chance, killed = random.Random(seed), []
    end_s = time.monotonic() + TIMEOUT_S
    with fault.timed("recovered"):
        refresh, done = start(home, recipe), None
        while not done:
            assert time.monotonic() < end_s, f"not done after {killed}"
            if len(killed) < NUM_KILLS and not ended(refresh, chance.uniform(*PAUSE_S)):
                killed.append(kill_one(home, refresh, chance, killed.count))
                continue
            done = finished(refresh, home)
            if not done:
                eventually(lambda: home.processes() == [])
                refresh = start(home, recipe)
    fault.name, fault.stage = f"{len(killed)} kills, seed {seed}: {', '.join(sorted(set(killed)))}", "all"
    assert done == undisturbed
    assert len(killed) == NUM_KILLS
    eventually(lambda: home.processes() == [])


def ended(refresh: subprocess.Popen[str], within_s: float) -> bool:
    try:
        refresh.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True
