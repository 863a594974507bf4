"""What a running stage says of itself, for views: progress with the time left, latest metrics, milestones."""

from __future__ import annotations

import time
from pathlib import Path

from flows.running.stage_observer import Tail

WARNING = "warning: "
SHOWN = ("loss", "real_tokens_per_s", "mfu")


class StageFeed:
    """Follows `events.jsonl` and `metrics.jsonl` of one work folder, from where they end now."""

    def __init__(self, work: Path):
        self._events = Tail(work / "events.jsonl", at_end=True)
        self._rows = Tail(work / "metrics.jsonl", at_end=True)
        self._first: tuple[float, float] | None = None
        self.done: float | None = None
        self.total: float | None = None
        self.unit = ""
        self.doing = ""
        self.eta_s: float | None = None
        self.per_s: float | None = None
        self.metrics: dict[str, float] = {}

    def news(self) -> list[str]:
        """Read on; returns new milestones and warnings."""
        messages = []
        for row in self._events.rows():
            if row.get("event") == "progress":
                self._note_progress(row)
            else:
                messages.append(f"{WARNING if row.get('event') == 'warning' else ''}{row.get('message', '')}")
        for row in self._rows.rows():
            self.metrics |= {name: row[name] for name in SHOWN if isinstance(row.get(name), int | float)}
        return messages

    def _note_progress(self, row: dict[str, object]) -> None:
        done, total = row.get("done"), row.get("total")
        if not isinstance(done, int | float) or not isinstance(total, int | float):
            self.done = self.total = self.eta_s = self.per_s = None
            self.doing = str(row.get("message", ""))
            return
        now_s = time.monotonic()
        if self._first is None or total != self.total or done < self._first[1]:
            self._first = now_s, done
        started_s, first_done = self._first
        advanced = done - first_done
        self.per_s = advanced / (now_s - started_s) if advanced > 0 and now_s > started_s else None
        self.eta_s = (total - done) / self.per_s if self.per_s else None
        self.done, self.total, self.unit = done, total, str(row.get("unit", ""))
