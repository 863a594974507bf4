"""What a trained model gave to a few documents, kept beside it: whatever is made of it later must give the same.

The training engine computes documents' log-probabilities and greedy tokens after its last step; the file is that of
`models/recorded.py`.
Merging, quantizing and serving compare with it. An adapter that changes none of them is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stages.core.contract import is_main_process
from stages.core.errors import ModelError
from stages.models.recorded import RecordedDocument, write_record

if TYPE_CHECKING:
    from stages.data.batch import Batch
    from stages.engines.engine import Engine

MOST_DOCUMENTS = 16


def record_log_probabilities(engine: Engine, batch: Batch, before: torch.Tensor | None, folder: Path) -> None:
    """Write what the engine gives to the first documents of `batch`. Collective; every process gives the same.

    before: of an adapter, what it gave to all of them before it learned. Raises ModelError when it gives the same now.
    """
    log_probabilities, greedy = engine.predictions(batch)
    sums = batch.document_sums(log_probabilities)
    if before is not None:
        _check_effect(before[:MOST_DOCUMENTS], sums[:MOST_DOCUMENTS], engine.compute_dtype)
    if not is_main_process():
        return
    documents = []
    for number in range(min(batch.num_documents, MOST_DOCUMENTS)):
        of_document = batch.document_ids == number
        of_targets = of_document & batch.has_target
        documents.append(
            RecordedDocument(
                batch.input_ids[of_document].tolist(),
                batch.targets[of_document].tolist(),
                sums[number].item(),
                log_probabilities[of_targets].tolist(),
                greedy[of_targets].tolist(),
            )
        )
    write_record(folder, documents, str(engine.compute_dtype).removeprefix("torch."))


def _check_effect(before: torch.Tensor, after: torch.Tensor, dtype: torch.dtype) -> None:
    """Relative differences of no document's sum are above the resolution of what it was computed in: nothing is left
    of such an adapter when it is merged, quantized or served."""
    change = ((after - before).abs() / before.abs().clamp(min=1)).max().item()
    if not change > torch.finfo(dtype).eps:
        raise ModelError(
            f"the adapter does nothing: {len(after)} documents have the log-probabilities that they had before it was "
            f"trained, up to {change:.1g} of them, which is rounding in {str(dtype).removeprefix('torch.')}; raise "
            "learning_rate, the steps or adapter.alpha"
        )
