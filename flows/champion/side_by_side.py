"""Tallies of a champion and its challenger, which their server records for other commands of this machine.

`<home>/servers/canary-NAME-PID.json`: a file for each server while it has a challenger. Files of killed servers are
ignored.
"""

from __future__ import annotations

import glob
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.ledger.home import home
from flows.ledger.process_identity import ProcessIdentity
from stages.core.files import write_atomically


def note(name: str, tallies: Mapping[str, Any]) -> None:
    """Record the tallies (`Proxy.side_by_side`) of a registered model."""
    noted = {"name": name, "process": ProcessIdentity.own().model_dump(), "time_s": time.time(), **tallies}
    file = _file(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(noted))


def forget(name: str) -> None:
    """Remove the record: the canary of this process has ended."""
    _file(name).unlink(missing_ok=True)


def served_canaries(name: str) -> list[dict[str, Any]]:
    """Return the records of servers on this machine that have a challenger; `time_s` is when it was written."""
    records = []
    for file in sorted(_folder().glob(f"canary-{glob.escape(name)}-*.json")):
        try:
            noted = json.loads(file.read_bytes())
        except FileNotFoundError:  # its canary has just ended
            continue
        process = ProcessIdentity.model_validate(noted.pop("process"))
        # The pattern also matches models whose name begins with this one.
        if noted.pop("name") == name and process.alive():
            records.append(noted)
    return records


def as_lines(canary: Mapping[str, Any]) -> list[str]:
    """Return a record for people: a line, and a table with a row for each version."""
    age_s = max(0.0, time.time() - canary["time_s"])
    versions = (canary["champion"], canary["challenger"])
    rows = [HEADING, *(_row(one, canary) for one in canary["versions"] if one["version"] in versions)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    title = f"served side by side, {canary['share']:.1%} of the requests to version {versions[1]}; {age_s:.0f} s ago:"
    return [title, *("  ".join(row).rstrip() for row in cells)]


HEADING = ("version", "requests", "errors", "p50 s", "p95 s", "prompt tokens", "tokens", "ended by")


def _row(counted: Mapping[str, Any], canary: Mapping[str, Any]) -> tuple[str, ...]:
    role = "champion" if counted["version"] == canary["champion"] else "challenger"
    latencies = (counted["latency_p50_s"], counted["latency_p95_s"])
    reasons = ", ".join(f"{reason} {count}" for reason, count in counted["finish_reasons"].items())
    return (
        f"{counted['version']}, {role}",
        str(counted["requests"]),
        str(counted["errors"]),
        *("–" if one is None else f"{one:.3g}" for one in latencies),
        str(counted["prompt_tokens"]),
        str(counted["completion_tokens"]),
        reasons or "–",
    )


def _folder() -> Path:
    return home() / "servers"


def _file(name: str) -> Path:
    return _folder() / f"canary-{name}-{os.getpid()}.json"
