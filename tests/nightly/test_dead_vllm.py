"""The real vLLM of a champion is killed under load, whole and in parts: no request is lost that had no answer yet."""

import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.champion.registry import Registry
from flows.ledger.home import store_root
from flows.store.store import Store
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
PROCESSES = {"all of it": b"", "what answers": b"vllm", "what computes": b"EngineCor"}


class Load:
    """Clients that ask again and again, every other time for a stream.

    cut: streams that ended in their middle. failures: whatever else went wrong.
    """

    def __init__(self, url: str):
        self.url = url
        self.answers: Counter[str] = Counter()
        self.cut = 0
        self.failures: list[str] = []
        self.last_s = time.monotonic()
        self._is_enough = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(NUM_CLIENTS)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_enough.set()
        for thread in self._threads:
            thread.join()

    def more(self, count: int = 2 * NUM_CLIENTS) -> None:
        enough = self.answers.total() + count
        wait_for(lambda: self.answers.total() >= enough or self.failures, 300, f"{count} more answers")

    def _ask(self, number: int) -> None:
        while not self._is_enough.wait(0.05):
            number += 1
            try:
                self._note(self._stream(number) if number % 2 else complete(self.url, self._question(number)))
            except Exception as error:
                self.failures.append(repr(error))

    def _note(self, answer: str | None) -> None:
        if answer is None:
            self.cut += 1
        else:
            self.answers[answer] += 1
            self.last_s = time.monotonic()

    def _question(self, number: int) -> dict:
        return {**QUESTION, "user": f"user {number % 8}"}

    def _stream(self, number: int) -> str | None:
        """The answer; None for one that was cut off after its first part."""
        parts = []
        with post(f"{self.url}/completions", {**self._question(number), "stream": True}) as answer:
            try:
                for line in answer:
                    if line.startswith(b"data: {"):
                        parts.append(json.loads(line.removeprefix(b"data: "))["choices"][0]["text"])
                    elif line.startswith(b"data: [DONE]"):
                        return "".join(parts)
            except (OSError, KeyError):
                pass
        assert parts, "cut off before its first part"
        return None


@contextmanager
def served(*options: str) -> Iterator[tuple[str, list[str]]]:
    """URL of a followed champion, and what is said of it."""
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
    """Those of the engine of the champion, seed 0: a session."""
    pids = engine_processes(folder)
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
    model = str(Store(store_root()).find(*registration(seed=0).model.split("/")).folder).encode()
    (session,) = {os.getsid(pid) for pid in pids if model in commands[pid]}
    names = {pid: Path(f"/proc/{pid}/comm").read_bytes() for pid in pids if os.getsid(pid) == session}
    return [pid for pid in names if PROCESSES[which] in names[pid]]


def kill_and_time(folder: Path, which: str, load: Load) -> float:
    """Seconds without an answer."""
    load.more()
    began_s = time.monotonic()
    kill(champion_processes(folder, which))
    wait_for(lambda: load.last_s > began_s + 1.0 or load.failures, 300, "an answer")
    first_s = load.last_s - began_s
    load.more()
    return first_s


def test_the_champion_is_back_after_one_start_whatever_is_killed(environment: Path) -> None:  # noqa: F811
    make_champion(registration(seed=0))
    with served() as (url, said), Load(url) as load:
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
    with served("--canary", "50%") as (url, said), Load(url) as load:
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
