"""What the stages of a refresh warned of, and which attempts at them were tried again."""

from __future__ import annotations

from flows.ledger.record import AttemptRecord, RefreshRecord
from stages.core.files import read_json_lines


def warnings_of(record: RefreshRecord) -> list[str]:
    """`STAGE, …: message` of what the stages that were built in this refresh warned of, each message once, and what
    became of the attempts that were tried again since the refresh was started last.
    """
    stages: dict[str, list[str]] = {}
    for name, entry in record.stages.items():
        file = entry.artifact / "events.jsonl" if entry.state == "built" and entry.artifact else None
        events = read_json_lines(file) if file and file.is_file() else []
        for message in {event["message"]: None for event in events if event["event"] == "warning"}:
            stages.setdefault(message, []).append(name)
    warned = [f"{', '.join(names)}: {message}" for message, names in stages.items()]
    retried = (one for one in record.attempts.values() if one.retried and one.started_ms >= record.started_ms)
    return [*warned, *(f"{one.stage}: attempt {one.number} {_reason(one)}" for one in retried)]


def _reason(attempt: AttemptRecord) -> str:
    how = "was killed" if attempt.outcome == "killed" else "failed"
    return f"{how}, tried again: {next(iter((attempt.error or '').splitlines()), '')}"
