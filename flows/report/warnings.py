"""What the stages of a refresh warned of."""

from __future__ import annotations

from flows.ledger.record import RefreshRecord
from stages.core.files import read_json_lines


def warnings_of(record: RefreshRecord) -> list[str]:
    """`STAGE, …: message` of what the stages that were built in this refresh warned of, each message once."""
    stages: dict[str, list[str]] = {}
    for name, entry in record.stages.items():
        file = entry.artifact / "events.jsonl" if entry.state == "built" and entry.artifact else None
        events = read_json_lines(file) if file and file.is_file() else []
        for message in {event["message"]: None for event in events if event["event"] == "warning"}:
            stages.setdefault(message, []).append(name)
    return [f"{', '.join(names)}: {message}" for message, names in stages.items()]
