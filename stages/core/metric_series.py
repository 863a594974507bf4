"""Reader of the metrics that a running stage logs, as JSON lines in `metrics.jsonl` of its work folder.

A line holds "step", "time_ms" and numbers (NaN, Infinity) by metric name. One attempt may log steps of an earlier one
again, of which the first value counts.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

METRICS_FILE = "metrics.jsonl"
NOT_METRICS = ("step", "time_ms")


@dataclass(frozen=True)
class LoggedStep:
    """Metrics that a stage logged at one step, by name, without those of a resumed attempt; and when."""

    step: int
    time_ms: int
    values: dict[str, float]


class MetricSeries:
    """Reader of a stage's logged metrics that continues, at each call, where it stopped before.

    position: byte at which the next line begins. last_steps: last step of each metric that was read.
    """

    def __init__(
        self,
        folder: Path,
        first_byte: int = 0,
        last_byte: int | None = None,
        last_steps: Mapping[str, int] | None = None,
    ) -> None:
        """Create a reader of a metrics file's bytes from `first_byte` to `last_byte` (default: its end).

        last_steps: last step of each metric before `first_byte`.
        """
        self.position = first_byte
        self.last_steps = dict(last_steps or {})
        self._file = folder / METRICS_FILE
        self._last_byte = last_byte

    def steps(self) -> Iterator[LoggedStep]:
        """Yield the training steps logged since the last call; the file need not exist yet.

        An unfinished last line is read once it is whole; a line that a crash has torn is left out.
        """
        with suppress(FileNotFoundError), self._file.open("rb") as stream:
            stream.seek(self.position)
            for line in stream:
                if not line.endswith(b"\n") or (self._last_byte is not None and self.position >= self._last_byte):
                    return
                self.position += len(line)
                if (logged := _parse(line)) and (new := self._without_repeats(logged)):
                    yield new

    def _without_repeats(self, logged: LoggedStep) -> LoggedStep | None:
        step, last_steps = logged.step, self.last_steps
        # `step - 1`: the first value of a metric always counts.
        values = {name: value for name, value in logged.values.items() if step > last_steps.get(name, step - 1)}
        last_steps.update(dict.fromkeys(values, step))
        return LoggedStep(step, logged.time_ms, values) if values else None


def _parse(line: bytes) -> LoggedStep | None:
    """Return the metrics of one step in a line of the metrics file; None if a crash left the line incomplete."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    values = {name: float(value) for name, value in row.items() if name not in NOT_METRICS}
    return LoggedStep(int(row["step"]), int(row["time_ms"]), values)


def last_steps(folder: Path, last_byte: int) -> dict[str, int]:
    """Return the last logged step of each metric, from the first `last_byte` bytes of a stage's metrics file."""
    series = MetricSeries(folder, last_byte=last_byte)
    for _ in series.steps():
        pass
    return series.last_steps


def metrics_size(folder: Path) -> int:
    """Return the size in bytes of the metrics file in a stage's work folder; 0 if there is none."""
    try:
        return (folder / METRICS_FILE).stat().st_size
    except FileNotFoundError:
        return 0
