"""Table that `make faults` prints: how soon each fault was detected and recovered from, and which work was lost."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

HEADINGS = ("fault", "stage", "detected in s", "recovered in s", "lost")


@dataclass
class Fault:
    """Fault that a test causes, a line in the table of `make faults`. lost: the work that had to be repeated."""

    name: str
    stage: str
    lost: str = "nothing"
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Record the duration of the `with` block as the seconds until the fault was `detected` or `recovered` from."""
        began_s = time.monotonic()
        yield
        self.seconds[what] = time.monotonic() - began_s

    def cells(self) -> tuple[str, ...]:
        """Return the fault's line in the table of `make faults` as cells, in the order of the headings."""
        times = [f"{self.seconds[what]:.1f}" if what in self.seconds else "" for what in ("detected", "recovered")]
        return (self.name, self.stage, *times, self.lost)


def lines(faults: Sequence[Fault]) -> Iterator[str]:
    """Yield the lines of the table that `make faults` prints, with aligned columns."""
    rows = [HEADINGS, *(fault.cells() for fault in faults)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
