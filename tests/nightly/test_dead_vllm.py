"""When some or all processes of the champion's vLLM are killed under load, only answers that had begun are lost."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.champion.registry import Registry
from flows.ledger.home import store_root
from flows.store.store import Store
from tests.load import CutOffError, Load
from tests.pipeline.test_follow import (
    LIFECYCLE,
    QUESTION,
    complete,
    environment,  # noqa: F401 (a fixture)
    make_champion,
    post,
    registration,
)
from tests.promotion import NAME
from tests.serving import engine_processes, kill, wait_for

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
NUM_CLIENTS = 8
PROCESSES = {"all of it": b"", "what answers": b"forking_program.py", "what computes": b"EngineCor"}


def load_of(url: str) -> Load:
    """Return clients that send completion requests continuously, half of them streamed, and count answers by text."""

    def ask(number: int) -> str:
        turn = number // NUM_CLIENTS + number % NUM_CLIENTS
        question = {**QUESTION, "user": f"user {turn % 8}"}
        return stream(url, question) if turn % 2 else complete(url, question)

    return Load(ask, NUM_CLIENTS, pause_s=0.05)


def stream(url: str, question: dict) -> str:
    """Return the text of a streamed completion. Raises CutOffError if the stream breaks off."""
    parts = []
    with post(f"{url}/completions", {**question, "stream": True}) as answer:
        try:
            for line in answer:
                if line.startswith(b"data: {"):
                    parts.append(json.loads(line.removeprefix(b"data: "))["choices"][0]["text"])
                elif line.startswith(b"data: [DONE]"):
                    return "".join(parts)
        except (OSError, KeyError):
            pass
    assert parts, "cut off before its first part"
    raise CutOffError


@contextmanager
def served(*options: str) -> Iterator[tuple[str, list[str]]]:
    """Run `lifecycle serve --follow` until the `with` block ends; yield its URL and the lines that it prints."""
    command = [LIFECYCLE, "serve", f"models:/{NAME}@champion", "--follow", *options]
    with subprocess.Popen(command, env=os.environ.copy(), text=True, stdout=subprocess.PIPE) as process:
        try:
            said: list[str] = []
            url = next(line.split(" at ")[1].strip() for line in process.stdout if line.startswith("serving "))
            threading.Thread(target=lambda: said.extend(process.stdout), daemon=True).start()
            yield url, said
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(90)


def champion_processes(folder: Path, which: str) -> list[int]:
    """Return the ids of processes of one kind that belong to the champion's vLLM."""
    pids = engine_processes(folder)
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
    # The program alone: a supervisor has the command that it runs among its later arguments.
    programs = {pid: b" ".join(command.split(b"\0")[:3]) for pid, command in commands.items()}
    model = str(Store(store_root()).find(*registration(seed=0).model.split("/")).folder).encode()
    (session,) = {os.getsid(pid) for pid in pids if model in commands[pid]}
    found = [pid for pid in pids if os.getsid(pid) == session and PROCESSES[which] in programs[pid]]
    assert found, f"no process is {which}"
    return found


def kill_and_time(folder: Path, which: str, load: Load) -> float:
    """Kill the champion's processes of one kind under load; return the seconds until the next answer."""
    load.more()
    began_s = time.monotonic()
    kill(champion_processes(folder, which))
    wait_for(lambda: load.last_s > began_s + 1.0 or load.failures, 300, "an answer")
    first_s = load.last_s - began_s
    load.more()
    return first_s


def test_the_champion_is_back_after_one_start_whatever_is_killed(environment: Path) -> None:  # noqa: F811
    make_champion(registration(seed=0))
    with served() as (url, said), load_of(url) as load:
        load.more()
        seconds = {which: kill_and_time(environment, which, load) for which in PROCESSES}
        print(f"answered again after {seconds} s; {load.answers.total()} answers, {load.cut} cut off")
    print("".join(said))
    assert load.failures == []
    assert len(load.answers) == 1
    assert sum("is served again" in line for line in said) == len(PROCESSES)
    assert not engine_processes(environment)


@pytest.mark.parametrize("starting", ["a successor", "a challenger"])
def test_the_champion_is_started_before_what_was_starting(environment: Path, starting: str) -> None:  # noqa: F811
    make_champion(registration(seed=0))
    with served("--canary", "50%") as (url, said), load_of(url) as load:
        load.more()
        registry = Registry()
        if starting == "a successor":
            make_champion(registration(seed=1))
        else:
            registry.challenge(registry.register(registration(seed=1)))
        wait_for(lambda: any("starting vLLM for version" in line for line in said), what="its start")
        time.sleep(3.0)  # far in it
        seconds = [kill_and_time(environment, "all of it", load) for _ in range(2)]
        expected = "is served\n" if starting == "a successor" else "gets 50.0% of the requests\n"
        wait_for(lambda: any(line.endswith(expected) for line in said), what="what was starting")
        load.more()
        print(f"answered again after {seconds} s; {load.answers.total()} answers, {load.cut} cut off")
        registry.withdraw_challenger(NAME)
    print("".join(said))
    assert load.failures == []
    assert len(load.answers) == 2
    assert any("is stopped" in line for line in said)
    assert not engine_processes(environment)
