"""Recording of a trained model's log-probabilities on a few documents, which merging, quantizing and serving compare.

The training engine computes log-probabilities and greedy tokens after its last step (`models/recorded.py`). How far
training has moved these tokens is reported; there is no bound on it, since equal passes over equal weights differ by
nothing on a CPU and by an unknown amount elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stages.core.contract import is_main_process
from stages.core.errors import ModelError
from stages.data.media.addresses import as_address, of_address
from stages.models.media import MediaError
from stages.models.recorded import RecordedDocument, write_record

if TYPE_CHECKING:
    from stages.data.batch import Batch
    from stages.engines.engine import Engine
    from stages.models.media import Medium, Sampling
    from stages.models.recorded import ToolPrompt

MOST_DOCUMENTS = 16
MOST_BYTES = 32 * 2**20
"""Largest size of the media of all recorded documents but the first, as they are written."""


@dataclass(frozen=True)
class RecordedBatch:
    """Batch of a few documents, the same on every process, whose log-probabilities are recorded with the model."""

    batch: Batch
    untrained: torch.Tensor | None = None
    """Log-probabilities of the target tokens under the model before training, float32 [targets]; None if unknown."""
    pictures: Sequence[Sequence[Medium]] = ()
    """Media of each document, in order; () for documents of text."""


def pictures_of(document: RecordedDocument, sampling: Sampling) -> list[Medium]:
    """Return the decoded media of a recorded document; raise ModelError if one cannot be decoded."""
    try:
        return [of_address(address, sampling) for address in document.pictures]
    except MediaError as error:
        raise ModelError(f"a medium that training recorded {error}; train the stage again with --force") from error


def record_log_probabilities(
    engine: Engine, recorded: RecordedBatch, folder: Path, tool_prompts: Sequence[ToolPrompt] = ()
) -> dict[str, float]:
    """Write the model's predictions for a batch's first documents; return how far training moved them. Collective."""
    batch = recorded.batch
    seen = batch.inputs.media is not None and bool(batch.inputs.media.features)
    assert not seen or recorded.pictures, "the documents have media, without which no one could compare them"
    log_probabilities, greedy = engine.predictions(batch)
    # [documents]: log-probability of each document, in nats
    sums = batch.documents.sums(log_probabilities)
    if is_main_process():
        documents: list[RecordedDocument] = []
        num_bytes = 0
        for number in range(min(batch.documents.count, MOST_DOCUMENTS)):
            pictures = [as_address(one) for one in recorded.pictures[number]] if recorded.pictures else []
            num_bytes += sum(map(len, pictures))
            if documents and num_bytes > MOST_BYTES:
                break
            of_document = batch.documents.ids == number  # bool [rows, sequence]
            of_targets = of_document & batch.signal.has_target
            documents.append(
                RecordedDocument(
                    batch.inputs.input_ids[of_document].tolist(),
                    batch.signal.targets[of_document].tolist(),
                    sums[number].item(),
                    log_probabilities[of_targets].tolist(),
                    greedy[of_targets].tolist(),
                    pictures,
                )
            )
        write_record(folder, documents, str(engine.compute_dtype).removeprefix("torch."), tool_prompts)
    if recorded.untrained is None:
        return {}
    changes = (log_probabilities[batch.signal.has_target] - recorded.untrained).abs()
    return {
        "changed_token_fraction": (changes > 0).float().mean().item(),
        "mean_abs_change_nats_per_token": changes.mean().item(),
    }
