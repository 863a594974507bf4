"""What a trained model gave to a few documents, kept beside it: whatever is made of it later must give the same.

The training engine computes documents' log-probabilities after its last step; the file is that of `models/recorded.py`.
Merging compares with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stages.core.contract import is_main_process
from stages.core.files import write_atomically
from stages.models.recorded import RECORD, read_record

if TYPE_CHECKING:
    from stages.data.dataset import PackedDataset
    from stages.engines.engine import Engine

MOST_DOCUMENTS = 16


@dataclass(frozen=True)
class Differences:
    """In nats per target token: of the document that differs most, and over all tokens."""

    most: float
    mean: float


def record_log_probabilities(engine: Engine, dataset: PackedDataset, micro_batch_size: int, folder: Path) -> None:
    """Write what the engine gives to the first documents of `dataset`. Collective; every process takes the same row."""
    batch = dataset.batch([0], micro_batch_size)
    sums = engine.document_log_probabilities(batch)
    if not is_main_process():
        return
    documents = []
    for number in range(min(batch.num_documents, MOST_DOCUMENTS)):
        of_document = batch.document_ids == number
        documents.append(
            {
                "input_ids": batch.input_ids[of_document].tolist(),
                "targets": batch.targets[of_document].tolist(),
                "log_probability": sums[number].item(),
            }
        )
    content = {"compute_dtype": str(engine.compute_dtype).removeprefix("torch."), "documents": documents}
    write_atomically(folder / RECORD, json.dumps(content) + "\n")


@torch.no_grad()
def differences_from_record(causal_lm: Any, folder: Path) -> Differences:
    """Of a Transformers model from what was recorded in `folder`. Raises ModelError when nothing was."""
    found = []
    for document in read_record(folder):
        targets = torch.tensor(document.targets)
        logits = causal_lm.eval()(input_ids=torch.tensor([document.input_ids])).logits[0]
        has_target = targets >= 0
        given = logits[has_target].float().log_softmax(1).gather(1, targets[has_target, None]).double().sum().item()
        found.append((abs(given - document.log_probability), document.num_targets))
    per_token = [difference / max(1, count) for difference, count in found]
    return Differences(max(per_token), sum(value for value, _ in found) / max(1, sum(count for _, count in found)))
