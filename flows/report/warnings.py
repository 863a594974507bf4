"""What the stages of a refresh warned of."""

from __future__ import annotations

import json

from flows.ledger.record import RefreshRecord


def warnings_of(record: RefreshRecord) -> list[str]:
    """`STAGE, …: message` of what the stages that were built in this refresh warned of, each message once."""
    stages: dict[str, list[str]] = {}
    for name, entry in record.stages.items():
        file = entry.artifact / "events.jsonl" if entry.state == "built" and entry.artifact else None
        lines = file.read_text(encoding="utf-8").splitlines() if file and file.is_file() else []
        for message in {event["message"]: None for event in map(json.loads, lines) if event["event"] == "warning"}:
            stages.setdefault(message, []).append(name)
    return [f"{', '.join(names)}: {message}" for message, names in stages.items()]
