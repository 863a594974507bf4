"""The nights of the year, one after the other: what is due, who dies, what is told, and what the champion answers."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import year_engine
from year_clock import Clock
from year_kills import Kill, carry_out, draw
from year_operator import YearHome, until
from year_stand_in.stages.__main__ import right_answers, trained
from year_world import Asker, Told

TOLD_TIMEOUT_S = 300.0


@dataclass
class Night:
    """When it was due, what was done to it, how it was told, and when it began and ended (of the monotonic clock)."""

    number: int
    due: datetime
    began_s: float
    events: list[str]
    told: list[Told] = field(default_factory=list)
    kill: Kill | None = None
    ended_s: float = 0.0
    disk_bytes: int = 0
    database_bytes: int = 0

    @property
    def said(self) -> str:
        """For messages: which night, what happened in it, how it ended."""
        killed = [f"SIGKILL of {self.kill.kind}"] if self.kill and self.kill.at_s else []
        what = ", ".join([*self.events, *killed]) or "undisturbed"
        return f"night {self.number} ({self.due:%Y-%m-%d}, {what}): {', '.join(one.state for one in self.told)}"


@dataclass
class Year:
    """What a year is made of. events: number of a night → name and deed of what the operator does before it."""

    home: YearHome
    clock: Clock
    told: list[Told]
    asker: Asker
    seed: int
    kinds: list[str]
    events: dict[int, list[tuple[str, Callable[["Year"], None]]]] = field(default_factory=dict)
    nights: list[Night] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def run(self, count: int) -> None:
        """Go on for so many nights."""
        first = len(self.nights) + 1
        for number in range(first, first + count):
            names = []
            for name, deed in self.events.get(number, []):
                deed(self)
                names.append(name)
            self.night(number, names)

    def night(self, number: int, events: list[str]) -> None:
        home = self.home
        home.add_rows(number)
        due = home.next_due()
        night = Night(number, due.astimezone(UTC), time.monotonic(), events)
        self.nights.append(night)
        known = len(self.told)
        self.clock.set(due - timedelta(seconds=1))
        killer = None
        if self.kinds and not events and self.chance.random() < 0.5:
            night.kill = draw(self.chance, number, self.kinds)
            killer = carry_out(night.kill, str(home.folder), self.chance)

        def ended() -> bool:
            night.told = self.told[known:]
            return bool(night.told) and home.is_quiet()

        until(ended, f"seed {self.seed}, {night.said}: it is told how it ended", TOLD_TIMEOUT_S)
        if killer:
            killer.join()
            until(home.is_quiet, f"seed {self.seed}, {night.said}: it is over")
        night.told = self.told[known:]
        night.ended_s = time.monotonic()
        night.disk_bytes, night.database_bytes = sizes(home.folder)
        print(f"{night.ended_s - night.began_s:5.1f} s  {night.disk_bytes / 2**20:6.1f} MiB  {night.said}", flush=True)


def sizes(home: Path) -> tuple[int, int]:
    """Bytes below a home, and those of them in databases."""
    all_bytes = database_bytes = 0
    for file in home.rglob("*"):
        try:
            size = 0 if file.is_symlink() or not file.is_file() else file.stat().st_size
        except OSError:  # gone meanwhile
            continue
        all_bytes += size
        database_bytes += size * (".db" in file.name)
    return all_bytes, database_bytes


def rows_of(folder: Path, night: int) -> bytes:
    """All rows that there were in a night."""
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.jsonl")) if int(path.stem[-3:]) <= night)


def expected_text(home: YearHome, night: int) -> str:
    """What a model that was trained in this night answers: a function of base and rows alone."""
    base = (home.folder.parent / "base" / "model.safetensors").read_bytes()
    return year_engine.says(trained(base, rows_of(home.rows, night)))


def expected_state(home: YearHome, night: int) -> str:
    """How an undisturbed night ends, when there is a good champion."""
    return "Promoted" if right_answers(rows_of(home.rows, night)) > 50 else "NotPromoted"
