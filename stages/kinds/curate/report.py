"""Report of a curation: every dropped row in `dropped.jsonl`, counts and examples in `report.json`, and metrics."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, BinaryIO

from stages.core.errors import DataError
from stages.core.redaction import shortened
from stages.data.bad_rows import needed_fraction
from stages.kinds.curate.config import CurateConfig
from stages.kinds.curate.spool import SourcePlace

BAD_ROWS, HELD_OUT = "bad_rows", "held_out"
NUM_EXAMPLES = 5
EXAMPLE_CHARACTERS = 200


class CurationReport:
    """Counts and examples of the rows that a curation reads and drops. Memory does not grow with the number of rows."""

    def __init__(self, steps: Sequence[str], stream: BinaryIO) -> None:
        self._stream = stream
        self._read: Counter[str] = Counter()
        self._dropped = Counter(dict.fromkeys((BAD_ROWS, *(step for step in steps if step != HELD_OUT)), 0))
        self.redacted: Counter[str] = Counter()
        """Number of masked texts of each kind of personal data."""
        self.num_held_out: int | None = None
        self._examples: dict[str, list[dict[str, object]]] = {step: [] for step in self._dropped}

    @property
    def state(self) -> dict[str, Any]:
        return {
            "read": self._read,
            "dropped": self._dropped,
            "redacted": self.redacted,
            "examples": self._examples,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._read.update(state["read"])
        self._dropped.update(state["dropped"])
        self.redacted.update(state["redacted"])
        self._examples = state["examples"]

    @property
    def num_read(self) -> int:
        return self._read.total()

    @property
    def num_kept(self) -> int:
        return self.num_read - self._dropped.total()

    def read(self, dataset: str) -> None:
        self._read[dataset] += 1

    def drop(self, place: SourcePlace, step: str, reason: str, content: object = None) -> None:
        self._dropped[step] += 1
        row = {**place.columns(), "step": step, "reason": reason}
        self._stream.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        if len(self._examples[step]) < NUM_EXAMPLES:
            text = shortened(json.dumps(content, ensure_ascii=False, default=str), EXAMPLE_CHARACTERS)
            self._examples[step].append({"row": str(place), "reason": reason, "content": text})

    def check(self, config: CurateConfig) -> None:
        """Raise DataError, with the steps' counts, if too many rows are unreadable or curation left no row."""
        self._check_bad_rows(config)
        if self.num_kept:
            return
        if not self.num_read:
            raise DataError(f"there are no rows in the datasets {', '.join(config.datasets)}; expected some to curate")
        emptied = next(step for step, _, kept in self._counts() if not kept)
        course = ", ".join(
            f"{step} dropped {dropped} and left {kept}" for step, dropped, kept in self._counts() if dropped
        )
        reasons = "; ".join(f"{example['row']} {example['reason']}" for example in self._examples[emptied])
        raise DataError(
            f"`{emptied}` leaves nothing of the dataset: of {self.num_read} rows, {course}. For instance {reasons}. "
            f"Widen `{emptied}`, or leave it out"
        )

    def _check_bad_rows(self, config: CurateConfig) -> None:
        num_bad, allowed = self._dropped[BAD_ROWS], config.max_bad_row_fraction
        if config.on_bad_rows == "drop" and num_bad <= allowed * self.num_read:
            return
        if num_bad:
            named = "\n".join(f"  {example['row']} {example['reason']}" for example in self._examples[BAD_ROWS])
            needed = needed_fraction(num_bad, self.num_read)
            fraction = f" and `max_bad_row_fraction: {needed:g}`" if needed > allowed else ""
            remedy = (
                f"raise max_bad_row_fraction, {allowed:g}, to {needed:g}"
                if config.on_bad_rows == "drop"
                else f"set `on_bad_rows: drop`{fraction} to skip them"
            )
            raise DataError(
                f"{num_bad} of {self.num_read} rows cannot be read:\n{named}\nFix these rows (all are in "
                f"dropped.jsonl), or {remedy}"
            )

    def document(self) -> dict[str, Any]:
        steps = [
            {"step": step, "dropped": dropped, "kept": kept, "examples": self._examples[step]}
            for step, dropped, kept in self._counts()
        ]
        more = {"redacted": dict(self.redacted), "held_out": self.num_held_out}
        return {"rows_read": dict(self._read), "steps": steps, **{name: count for name, count in more.items() if count}}

    def metrics(self) -> dict[str, float]:
        found = {"num_rows": float(self.num_kept), "kept_share": self.num_kept / max(1, self.num_read)}
        found |= {} if self.num_held_out is None else {"num_held_out": float(self.num_held_out)}
        found |= {f"dropped_{step}": float(dropped) for step, dropped, _ in self._counts()}
        return found | {f"redacted_{kind}": float(count) for kind, count in self.redacted.items()}

    def sentence(self) -> str:
        """Return one sentence for the log: how many rows were kept, and how many each step dropped."""
        dropped = ", ".join(f"{step} dropped {dropped}" for step, dropped, _ in self._counts() if dropped)
        held_out = f" ({self.num_held_out} of them held out)" if self.num_held_out else ""
        return f"{self.num_kept} of {self.num_read} rows are kept{held_out}{': ' if dropped else ''}{dropped}"

    def _counts(self) -> list[tuple[str, int, int]]:
        """Return each curation step's name, how many rows it dropped, and how many were left after it."""
        left, found = self.num_read, []
        for step, dropped in self._dropped.items():
            left -= dropped
            found.append((step, dropped, left))
        return found
