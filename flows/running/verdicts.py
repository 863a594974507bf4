"""What the promotions of a refresh found, as the tables that their stages wrote."""

from __future__ import annotations

from flows.ledger.record import RefreshRecord
from stages.promote.verdict import TABLE_FILE


def verdict_tables(record: RefreshRecord) -> dict[str, str]:
    """Name of each promotion that was built or found cached → Markdown."""
    return {
        name: (entry.artifact / TABLE_FILE).read_text(encoding="utf-8")
        for name, entry in record.stages.items()
        if entry.verdict and entry.artifact
    }
