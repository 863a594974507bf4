"""Nights of the simulated year: each has a refresh, perhaps a random kill, notifications, and a recorded end state."""

import contextlib
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import year_engine
from year_clock import Clock
from year_kills import Kill, carry_out, draw
from year_operator import YearHome, until
from year_stand_in.stages.__main__ import right_answers, trained
from year_world import ClientThread, Notification, Unit

TOLD_TIMEOUT_S = 300.0
TIDY_EVERY = 5


@dataclass
class Night:
    """Simulated night: when its refresh was due, faults, events, notifications, begin and end (monotonic clock)."""

    number: int
    due: datetime
    began_s: float
    events: list[str]
    notified: list[Notification] = field(default_factory=list)
    kill: Kill | None = None
    ended_s: float = 0.0
    sizes: dict[str, int] = field(default_factory=dict)
    """Size in bytes of each folder of the lifecycle home after the simulated night."""

    @property
    def summary(self) -> str:
        """Summary of a night for messages: number, date, events and kill, and the states that the refresh ended in."""
        killed = [f"SIGKILL of {self.kill.kind}"] if self.kill and self.kill.at_s else []
        what = ", ".join([*self.events, *killed]) or "undisturbed"
        states = ", ".join(notification.state for notification in self.notified)
        return f"night {self.number} ({self.due:%Y-%m-%d}, {what}): {states}"


@dataclass
class Life:
    """Period of a simulated lifecycle home, until `until_s` (monotonic), when its backup replaces it.

    versions: hash of the weights of each registered model version.
    """

    until_s: float = float("inf")
    versions: dict[str, str] = field(default_factory=dict)


@dataclass
class Year:
    """State of a simulated year of nightly refreshes: lifecycle home, clock, events, nights so far.

    keep: the home's retention policy. events: names and functions of the events before a night, by its number; a
    function whose work goes on during the night returns its thread. unit: process that serves the champion. kinds:
    kinds of processes that are killed. lives: periods of the home; a restored backup begins another. chains: versions
    and digests of the artifacts of real stages, for each of their refreshes.
    """

    home: YearHome
    clock: Clock
    notified: list[Notification]
    asker: ClientThread
    seed: int
    keep: dict[str, Any]
    events: dict[int, list[tuple[str, Callable[["Year"], threading.Thread | None]]]]
    unit: Unit | None = None
    kinds: list[str] = field(default_factory=list)
    nights: list[Night] = field(default_factory=list)
    lives: list[Life] = field(default_factory=lambda: [Life()])

    chains: list[dict[str, tuple[str, str]]] = field(default_factory=list)
    versions_of_backup: dict[str, str] = field(default_factory=dict)

    @property
    def backup(self) -> Path:
        return self.home.folder.with_name("backup")

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def run(self, count: int) -> None:
        """Simulate the next `count` nights, with the events before them."""
        first = len(self.nights) + 1
        for number in range(first, first + count):
            if number % TIDY_EVERY == 0:  # the worker does it once a day, but by the machine's own time
                self.home.does("gc", "--policy")
            deeds = self.events.get(number, [])
            threads = [deed(self) for _, deed in deeds]
            self.night(number, [name for name, _ in deeds], [thread for thread in threads if thread])

    def night(self, number: int, events: list[str], threads: list[threading.Thread]) -> None:
        home = self.home
        home.add_rows(number)
        due = home.next_due()
        night = Night(number, due.astimezone(UTC), time.monotonic(), events)
        self.nights.append(night)
        known = len(self.notified)
        self.clock.set(due - timedelta(seconds=1))
        if self.kinds and not events and self.chance.random() < 0.5:
            night.kill = draw(self.chance, number, self.kinds)
            threads.append(carry_out(night.kill, str(home.folder), self.chance))

        def ended() -> bool:
            night.notified = self.notified[known:]
            return bool(night.notified) and home.is_quiet()

        def it_is_over() -> str:
            return f"seed {self.seed}, {night.summary}: it is notified, and over: {', '.join(home.unfinished())}"

        until(ended, it_is_over, TOLD_TIMEOUT_S)
        for thread in threads:
            thread.join()
            until(home.is_quiet, it_is_over)
        night.notified = self.notified[known:]
        night.ended_s = time.monotonic()
        night.sizes = sizes(home.folder)
        self.lives[-1].versions |= until(self.versions, f"seed {self.seed}, {night.summary}: MLflow answers")
        mebibytes = f"{sum(night.sizes.values()) / 2**20:5.1f} MiB"
        print(f"{night.ended_s - night.began_s:5.1f} s  {mebibytes}  {night.summary}", flush=True)

    def versions(self) -> dict[str, str]:
        """Return the registered model versions with the hashes of their weights; empty while MLflow does not answer."""
        with contextlib.suppress(OSError):
            return self.home.versions()
        return {}


def sizes(home: Path) -> dict[str, int]:
    """Return the bytes in each folder of a lifecycle home, without the write-ahead logs of databases."""
    counted: dict[str, int] = defaultdict(int)
    for folder, _, names in os.walk(home):  # which skips folders that are gone meanwhile
        for file in (Path(folder) / name for name in names if not name.endswith("-wal")):
            with contextlib.suppress(FileNotFoundError):
                counted[file.relative_to(home).parts[0]] += file.lstat().st_size
    return dict(counted)


def rows_of(folder: Path, night: int) -> bytes:
    """Return the training rows that exist in a simulated night: the content of all their files, joined."""
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.jsonl")) if int(path.stem[-3:]) <= night)


def expected_text(home: YearHome, night: int) -> str:
    """Return the answer that a simulated night's model must give. It depends only on base model and training rows."""
    base = (home.folder.parent / "base" / "model.safetensors").read_bytes()
    return year_engine.says(trained(base, rows_of(home.rows, night)))


def expected_state(home: YearHome, night: int) -> str:
    """Return the state, Promoted or NotPromoted, in which an undisturbed night must end when a good champion exists."""
    return "Promoted" if right_answers(rows_of(home.rows, night)) > 50 else "NotPromoted"
