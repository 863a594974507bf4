"""Random kills (SIGKILL) of a lifecycle home's processes in the simulated year."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from year_world import command_of, environ_of, kill

from stages.core.process_tree import living_processes

LOOK_EVERY_S = 0.05
LONGEST_WAIT_S = 25.0
LATEST_S, LATEST_OF_SHORT_S = 5.0, 0.3
"""Longest delays in seconds from seeing a process to killing it: for long-lived and for short-lived processes."""
KINDS: dict[str, Callable[[list[str]], bool]] = {
    "prefect": lambda command: "flows.servers.guarded" in command and "prefect" in command,
    "mlflow": lambda command: "flows.servers.guarded" in command and "mlflow" in command,
    "worker": lambda command: "flows.service.worker" in command,
    "servers' supervisor": lambda command: "flows.servers.supervisor" in command,
    "flow": lambda command: "prefect.engine" in command,
    "shipper": lambda command: "flows.tracking.shipper" in command,
    "stage": lambda command: "stages" in command and "-m" in command,
    "rank": lambda command: "stages" in command and any("/dpo-" in part for part in command),
    "judge": lambda command: "flows.champion.promotion" in command,
    "stage's supervisor": lambda command: any(part.endswith("stages/core/process_tree.py") for part in command),
    "engine": lambda command: any(part.endswith("year_engine.py") for part in command),
    "proxy": lambda command: "serve" in command and any(part.endswith("bin/lifecycle") for part in command),
}


@dataclass
class Kill:
    """SIGKILL planned `after_s` seconds after a process of its kind is seen. at_s: when it was done (monotonic)."""

    night: int
    kind: str
    after_s: float
    at_s: float | None = None


LONG_LIVED = ("prefect", "mlflow", "worker", "servers' supervisor", "flow", "engine", "proxy")


def draw(chance: random.Random, night: int, kinds: list[str]) -> Kill:
    kind = chance.choice(kinds)
    return Kill(night, kind, chance.uniform(0, LATEST_S if kind in LONG_LIVED else LATEST_OF_SHORT_S))


def processes(folder: str, kind: str) -> list[int]:
    """Return the ids of living processes of one kind, such as `worker`, whose environment contains `folder`."""
    of_kind = KINDS[kind]
    return [pid for pid in living_processes() if of_kind(command_of(pid)) and folder in environ_of(pid)]


def carry_out(
    planned: Kill, folder: str, chance: random.Random, longest_wait_s: float = LONGEST_WAIT_S
) -> threading.Thread:
    """Carry out a planned kill in a thread: wait for a process of its kind and kill it, or give up if none appears."""

    def work() -> None:
        end_s = time.monotonic() + longest_wait_s
        while not (found := processes(folder, planned.kind)) and time.monotonic() < end_s:
            time.sleep(LOOK_EVERY_S)
        time.sleep(planned.after_s)
        if found and kill(chance.choice(found)):
            planned.at_s = time.monotonic()

    thread = threading.Thread(target=work)
    thread.start()
    return thread
