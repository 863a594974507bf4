"""What trainings have learned from: how long its documents are, and each dataset's share of a mixture."""

from __future__ import annotations

from collections.abc import Iterator

from flows.ledger.record import RefreshRecord, StageEntry
from flows.report.model import DataOfTraining, Histogram, Share
from stages.data.summaries import LENGTHS_FILE, Lengths

ASKED, SEEN = "share_asked.", "share_seen."


def data_of_trainings(record: RefreshRecord) -> Iterator[DataOfTraining]:
    """Of each training that has said something of it; those of before lengths were counted have none."""
    for name, entry in record.stages.items():
        if entry.kind != "train":
            continue
        found = DataOfTraining(stage=name, lengths=tuple(_lengths(entry)), shares=tuple(_shares(entry.metrics)))
        if found.lengths or found.shares:
            yield found


def _lengths(entry: StageEntry) -> Iterator[Histogram]:
    file = entry.artifact and entry.artifact / LENGTHS_FILE
    if file and file.is_file():
        found = Lengths.model_validate_json(file.read_bytes())
        for dataset, counts in found.counts.items():
            yield Histogram(dataset=dataset, bin_tokens=found.bin_tokens, counts=counts)


def _shares(metrics: dict[str, float]) -> Iterator[Share]:
    for name, asked in metrics.items():
        if name.startswith(ASKED):
            dataset = name.removeprefix(ASKED)
            yield Share(dataset=dataset, asked=asked, seen=metrics.get(f"{SEEN}{dataset}"))
