"""After any process of any stage is killed, the next run ends with the same bytes as an undisturbed refresh."""

import os
import signal
import subprocess
from pathlib import Path

import chain
import pytest
import tiny

from stages.core.process_tree import living_processes


def child_of(parent: int) -> int:
    children = [pid for pid, (its_parent, _) in living_processes().items() if its_parent == parent]
    assert children, f"{parent} has no children"
    return min(children)


def rank_of(store: Path, rank: int) -> int | None:
    """Return the process id of the rank with this number, of the training in this store; None if it has not begun."""
    for pid in living_processes():
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if f"RANK={rank}".encode() in variables and str(store).encode() in command and b"--stage" in command:
            return pid
    return None


def find(victim: str, refresh: subprocess.Popen[str], store: Path) -> int:
    if victim.startswith("rank"):
        rank = int(victim.removeprefix("rank "))
        return tiny.eventually(lambda: rank_of(store, rank), f"there is no rank {rank}")
    flow = refresh.pid
    return {"flow": lambda: flow, "supervisor": lambda: child_of(flow), "process": lambda: child_of(child_of(flow))}[
        victim
    ]()


def disturb(store, stage, victim, number, ranks, fault) -> str:
    """Start a refresh, send a signal to one of its processes after a few steps, and return its error output."""
    fault.name, fault.stage = f"{number.name} of {victim}", stage
    refresh = chain.start(store, ranks, held=stage)
    tiny.eventually(lambda: chain.step_of(store, stage) >= 2 or refresh.poll() is not None, f"{stage} made no steps")
    with fault.timed("detected"):
        os.kill(find(victim, refresh, store), number)
        _, errors = refresh.communicate(timeout=tiny.PATIENCE_S)
        tiny.eventually(lambda: not others_of(store), "processes are left")
    assert refresh.returncode != 0
    return errors


def others_of(store: Path) -> list[int]:
    """Return the paths `/proc/PID/cmdline` of living processes that have the store's path as an argument."""
    commands = [Path(f"/proc/{pid}/cmdline") for pid in living_processes()]
    return [path for path in commands if path.exists() and str(store).encode() in read(path)]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def recover(store, stage, ranks, undisturbed, fault) -> None:
    """Run a faulted refresh again; check that finished stages are cached, and digests are those without fault."""
    reached = chain.step_of(store, stage)
    assert 2 <= reached <= chain.NUM_STEPS
    with fault.timed("recovered"):
        again = chain.run_refresh(store, ranks)
    assert chain.identities(again) == undisturbed(ranks)
    states = [again[name]["state"] for name in chain.STAGES]
    done = chain.STAGES.index(stage)
    assert states == ["cached"] * done + ["built"] * (len(states) - done)
    assert again[stage]["first_step"] == reached
    fault.lost = f"nothing: went on at step {reached} of {chain.NUM_STEPS}"


STAGES_AND_SIGNALS = [(stage, signal.SIGKILL) for stage in ("base", "sft", "awq", "scores")] + [("sft", signal.SIGTERM)]
FEW = {
    ("flow", "base", signal.SIGKILL),
    ("supervisor", "awq", signal.SIGKILL),
    ("process", "scores", signal.SIGKILL),
    ("process", "sft", signal.SIGTERM),
    (0, signal.SIGTERM),
    (1, signal.SIGKILL),
}
"""Kills that `make test` tries: each kind of process, signal and stage occurs. All other cases are nightly."""


def kills(*all_of_them):
    """Return test cases as pytest parameters; all but those in `FEW` are marked as nightly."""
    return [pytest.param(*one, marks=() if one in FEW else pytest.mark.nightly) for one in all_of_them]


@pytest.mark.parametrize(
    ("victim", "stage", "number"),
    kills(*((victim, *place) for victim in ("flow", "supervisor", "process") for place in STAGES_AND_SIGNALS)),
)
def test_a_refresh_whose_process_was_killed_goes_on_where_it_was(tmp_path, undisturbed, fault, number, victim, stage):
    errors = disturb(tmp_path, stage, victim, number, 1, fault)
    if victim == "process":
        assert f"was killed by {number.name}" in errors
    recover(tmp_path, stage, 1, undisturbed, fault)


@pytest.mark.parametrize(
    ("rank", "number"), kills(*((rank, number) for rank in (0, 1) for number in (signal.SIGKILL, signal.SIGTERM)))
)
def test_training_whose_rank_was_killed_goes_on_where_it_was(tmp_path, undisturbed, fault, number, rank):
    errors = disturb(tmp_path, "sft", f"rank {rank}", number, 2, fault)
    assert f"rank {rank} was killed by {number.name}" in errors
    recover(tmp_path, "sft", 2, undisturbed, fault)
