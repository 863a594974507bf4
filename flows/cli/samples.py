"""`lifecycle show EVALUATION --samples`: what a model was asked, what it answered, and what was expected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from flows.store.record import Artifact
from stages.core.errors import StoreError
from stages.core.files import read_json_lines
from stages.core.redaction import quoted
from stages.harnesses.samples import answered, asked

MOST_SAMPLES = 20
"""Of a task; files hold the rest."""
SHOWN_CHARACTERS = 1000


def samples_of(artifact: Artifact) -> Iterator[dict[str, Any]]:
    """Yield the first samples of each task of an evaluation. Raises StoreError for an artifact without samples."""
    files = sorted((artifact.folder / "samples").glob("*.jsonl"))
    if not files:
        raise StoreError(
            f"showing samples of {artifact.folder.name}: it is of kind {artifact.record.kind} and has none; name "
            "a stage of kind evaluate"
        )
    for file in files:
        for row in islice(read_json_lines(file), MOST_SAMPLES):
            yield {
                "file": str(file),
                "sample": row["doc_id"],
                "asked": asked(row),
                "answered": answered(row["resps"]),
                "expected": str(row.get("target", "")),
                "scores": {name: row[name] for name in row.get("metrics", ()) if name in row},
            }


def as_text(samples: Iterable[dict[str, Any]]) -> str:
    """Return a paragraph a sample."""
    paragraphs = []
    for sample in samples:
        scores = ", ".join(f"{name} {value}" for name, value in sample["scores"].items())
        lines = [f"{sample['file']}, sample {sample['sample']}: {scores}"]
        lines += [f"  {part}: {quoted(sample[part], SHOWN_CHARACTERS)}" for part in ("asked", "answered", "expected")]
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)
