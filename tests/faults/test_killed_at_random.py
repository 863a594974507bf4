"""A refresh ends with the right artifacts although its processes are killed at random moments.

Its stages are SFT, DPO, quantization and evaluation, with real Prefect, MLflow and vLLM. Each seed (KILL_SEEDS many)
kills a process of every kind once: flow, supervisor, rank, quantizer, vLLM, Prefect, MLflow. Some kinds live in one
stage only, so they die in the order of the stages; the others come between them at random, and the process and the time
of its death are random, too. Whenever the refresh dies it is run again; in the end every artifact has the version and
the bytes of an undisturbed refresh.

In `make test`: `test_killed_anywhere.py`, `test_train_faults.py`, `test_serve_faults.py` and `test_server_faults.py`.
"""

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))
from refreshes import LIFECYCLE, ROOT, Home, eventually

from stages.core.process_tree import living_processes

STAGE_OF = {"rank": "dpo", "quantizer": "awq", "vLLM": "scores"}
"""Stage that each kind of process belongs to, in the order in which the stages run."""
ALWAYS_THERE = ("flow", "supervisor", "prefect", "mlflow")
POLL_INTERVAL_S = 0.1
TIMEOUT_S = 1800

ONE_THREAD = {"threads": 1}
TRAINING = {"global_batch_size": 4, "learning_rate": 1e-3, "precision": "fp32", "export_dtype": "float32"}
OFTEN_SAVED = {**ONE_THREAD, "checkpoint_every_steps": 4, "measure_matmul_rate": False}
RECIPE = {
    "base": {"kind": "download", "model": "builtin/qwen3-1m"},
    "problems": {"kind": "download", "dataset": "builtin/addition"},
    "preferences": {"kind": "download", "dataset": "builtin/addition-preferences"},
    "sft": {
        "kind": "train",
        "method": "sft",
        "model": "base",
        "data": {"dataset": "problems", "sequence_length": 64},
        "steps": 20,
        "layout": {"micro_batch_size": 2},
        **TRAINING,
        "execution": OFTEN_SAVED,
    },
    "dpo": {
        "kind": "train",
        "method": "dpo",
        "model": "sft",
        "data": {"dataset": "preferences", "sequence_length": 128},
        "steps": 12,
        "layout": {"dp_shard": 2, "micro_batch_size": 2},
        **TRAINING,
        "execution": OFTEN_SAVED,
    },
    "awq": {
        "kind": "quantize",
        "model": "dpo",
        "method": "awq",
        "group_size": 32,
        "calibration": {
            "dataset": "problems",
            "sequence_length": 64,
            "num_samples": 16,
            "num_evaluation_samples": 16,
        },
        "execution": ONE_THREAD,
    },
    "scores": {
        "kind": "evaluate",
        "model": "awq",
        "tasks": ["addition"],
        "task_folder": str(ROOT / "configs" / "tasks"),
        "limit": 4,
        "serving": {"max_model_len": 256, "enforce_eager": True, "kv_cache_memory_gib": 0.0625},
        "execution": ONE_THREAD,
    },
}

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2 * TIMEOUT_S)]


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
    """Return the JSON output of a refresh without faults, and its artifacts' versions and digests."""
    said = finished(start(home, recipe))
    assert said, (home.folder.parent / "refresh.log").read_text()[-4000:]
    return said, made(home, said)


def start(home: Home, recipe: Path) -> subprocess.Popen[str]:
    log = (home.folder.parent / "refresh.log").open("a")
    command = [LIFECYCLE, "run", str(recipe), "--json"]
    return subprocess.Popen(command, env=home.environment, text=True, stdout=subprocess.PIPE, stderr=log)


def forget(home: Home) -> None:
    """Delete all artifacts except downloads, so that the next refresh runs all other stages again."""
    for folder in (home.folder / "store").iterdir():
        if folder.name != "download":
            shutil.rmtree(folder)


def finished(refresh: subprocess.Popen[str]) -> dict[str, Any] | None:
    """Wait for a refresh process to end; return its JSON output, or None if it failed."""
    said, _ = refresh.communicate(timeout=TIMEOUT_S)
    return json.loads(said) if refresh.returncode == 0 else None


def made(home: Home, said: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return version and content digest of the artifact of each stage."""
    versions = {name: entry["version"] for name, entry in said["stages"].items()}
    records = {
        name: next(home.folder.glob(f"store/*/{name}-{version}/record.json")) for name, version in versions.items()
    }
    return {name: (versions[name], json.loads(record.read_text())["digest"]) for name, record in records.items()}


def living(home: Home, refresh: subprocess.Popen[str]) -> dict[str, list[int]]:
    """Return the ids of the refresh's living processes by kind. A server's id is that of its process group's leader."""
    found: dict[str, list[int]] = {}
    store = str(home.folder / "store")
    for pid, (parent, _) in living_processes().items():
        command, variables = read(pid, "cmdline"), read(pid, "environ")
        if str(home.folder) not in variables:
            continue
        if parent == refresh.pid and store in command:
            found.setdefault("supervisor", []).append(pid)
        elif "\nRANK=" in variables and "-m\nstages" in command:
            found.setdefault("rank", []).append(pid)
        elif "/awq-" in command and "-m\nstages" in command:
            found.setdefault("quantizer", []).append(pid)
        elif "vllm" in command:
            found.setdefault("vLLM", []).append(pid)
    if "supervisor" in found:
        found["flow"] = [refresh.pid]
        found |= {name: [server["process"]["pid"]] for name, server in home.servers().items() if name in ALWAYS_THERE}
    return found


def read(pid: int, file: str) -> str:
    """Return a process's arguments or environment variables, one a line; "" if the process has ended."""
    try:
        return "\n" + Path(f"/proc/{pid}/{file}").read_text(errors="replace").replace("\0", "\n")
    except OSError:
        return ""


def kill_later(pid: int, after_s: float, *, with_group: bool) -> bool:
    """Kill a process, or its whole group, after a delay; return False if it has ended by itself before."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        has_ended, _, _ = select.select([handle], [], [], after_s)
        if has_ended:
            return False
        os.killpg(pid, signal.SIGKILL) if with_group else signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:  # it ended between the two
        return False
    finally:
        os.close(handle)
    return True


def drawn_order(chance: random.Random) -> list[str]:
    """Return the kinds of processes that the test kills, in random order."""
    kinds = list(STAGE_OF)
    for kind in ALWAYS_THERE:
        kinds.insert(chance.randint(0, len(kinds)), kind)
    return kinds


def kill_in_turn(
    home: Home, refresh: subprocess.Popen[str], kinds: list[str], longest_wait_s: float, chance: random.Random
) -> None:
    """Kill one process of each kind, in order, while the refresh runs, and remove the kind from `kinds`."""
    while kinds and refresh.poll() is None:
        kind = kinds[0]
        pids = living(home, refresh).get(kind)
        is_server = kind in home.servers()
        if not pids:
            time.sleep(POLL_INTERVAL_S)
        elif kill_later(chance.choice(pids), chance.uniform(0, longest_wait_s), with_group=is_server):
            kinds.pop(0)
            assert not is_server or home.lifecycle("up").returncode == 0


@pytest.mark.parametrize("seed", range(int(os.environ.get("KILL_SEEDS", "3"))))
def test_a_refresh_whose_processes_are_killed_at_random_ends_with_the_bytes_of_an_undisturbed_one(
    home, recipe, undisturbed, fault, seed
):
    said, expected = undisturbed
    # A fraction, not seconds: however fast the machine is, the stage whose process is to die is not over by then.
    longest_wait_s = min(said["stages"][name]["seconds"] for name in STAGE_OF.values()) / 3
    chance = random.Random(seed)
    kinds = drawn_order(chance)
    fault.name, fault.stage = f"killed at random: {', '.join(kinds)}", "all"
    end_s = time.monotonic() + TIMEOUT_S
    done = None
    forget(home)
    with fault.timed("recovered"):
        while kinds or not done:
            assert time.monotonic() < end_s, f"not done; {', '.join(kinds) or 'nothing'} left to kill"
            if done:  # faster than it was undisturbed, so that a stage was over before its process could die
                forget(home)
            refresh = start(home, recipe)
            kill_in_turn(home, refresh, kinds, longest_wait_s, chance)
            done = finished(refresh)
            eventually(lambda: home.processes() == [])
    assert made(home, done) == expected
