"""Reference log-probabilities: those of all documents under the untrained model, computed once and cached on disk.

Computing them before training keeps only one model in memory. The cache key has everything that decides them: the
model's weights, the packed data, the rows, the precision.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import JsonValue

from stages.core.cache import content_key, file_digest, is_intact, is_sealed, write_seal
from stages.core.contract import StageContext, is_main_process
from stages.data.batch import Batch
from stages.data.dataset import PackedDataset
from stages.engines.engine import Engine
from stages.kinds.train.methods.method import BatchChange
from stages.kinds.train.order import even_micro_batches
from stages.kinds.train.watchdog import Watchdog


@dataclass(frozen=True)
class ReferenceRows:
    """Log-probabilities of the documents in some dataset rows, computed by the reference model."""

    documents: NDArray[np.int64]
    """Sorted numbers, within the dataset, of the documents that have reference log-probabilities, int64 [documents]."""
    log_probabilities: NDArray[np.float32]
    """Reference log-probabilities in nats, float32 [documents], sums over a document's targets."""

    def attach(self, batch: Batch, documents: NDArray[np.int64]) -> Batch:
        """Return the batch with the reference log-probabilities of its documents added."""
        positions = np.searchsorted(self.documents, documents)
        return batch.with_reference(torch.from_numpy(self.log_probabilities[positions]))


@dataclass(frozen=True)
class ReferenceModel:
    """Reference model: the untrained model in the engine, with the adapter that training starts from (as in TRL)."""

    engine: Engine
    weights_digest: str
    """Digest of the loaded model's weights and configs (`model_digest`), for the cache of log-probabilities."""
    micro_batch_size: int
    context: StageContext
    watchdog: Watchdog

    def rows(
        self,
        dataset: PackedDataset,
        rows: Sequence[int],
        change: BatchChange | None = None,
        *,
        mismatched: bool = False,
    ) -> ReferenceRows:
        """Return the documents' log-probabilities under the reference model, from the cache or computed. Collective.

        rows: sorted, distinct. change: of each batch; `repr` in the key. mismatched: of answers paired with other
        prompts.
        """
        documents = dataset.row_documents(rows)
        identity: dict[str, JsonValue] = {
            "weights": self.weights_digest,
            "data": dataset.key,
            "documents": hashlib.sha256(documents.tobytes()).hexdigest(),
            "compute_dtype": str(self.engine.compute_dtype),
        }
        if change:
            identity["change"] = repr(change)
        if mismatched:
            identity["mismatched"] = True
        path = self.context.cache / "reference" / f"{content_key(identity)}.npy"
        is_usable = is_intact(path)
        if self.engine.broadcast_from_rank0(float(is_usable)):
            return ReferenceRows(documents, np.load(path))
        if is_sealed(path) and not is_usable:
            self.context.warn(f"reference log-probabilities: {path} was damaged, so they are computed again")
        values = self._compute(dataset, rows, dataset.mismatched if mismatched else dataset.batch, change)
        if is_main_process():
            _save(path, values)
        return ReferenceRows(documents, values)

    def _compute(
        self,
        dataset: PackedDataset,
        rows: Sequence[int],
        make: Callable[[Sequence[int], int], Batch],
        change: BatchChange | None,
    ) -> NDArray[np.float32]:
        """Compute the documents' log-probabilities on every process, float32 [documents]."""
        engine = self.engine
        # documents of the rows [2, 3] -> [0, 2, 5]: where each row's begin
        positions = np.cumsum([0, *(len(dataset.row_documents([row])) for row in rows)]).tolist()
        # Each process fills in its own rows; the sum over processes is then the whole.
        values = torch.zeros(positions[-1], dtype=torch.float64)
        shares = list(even_micro_batches(len(rows), self.micro_batch_size, engine.data_rank, engine.data_parallel_size))
        for index, share in enumerate(shares):
            self.watchdog.begins(f"micro-batch {index + 1} of {len(shares)} of the reference log-probabilities")
            batch = make([rows[position] for position in share], self.micro_batch_size)
            result = engine.document_log_probabilities(change(batch) if change else batch)
            if share:
                values[positions[share[0]] : positions[share[-1] + 1]] = result
            self.context.progress(index + 1, len(shares), "micro-batches", "reference log-probabilities")
        return engine.sum_over_data(values).float().numpy()


def model_digest(*folders: Path) -> str:
    """Return a digest of the weights and configs in a Hugging Face folder, and in an adapter's folder."""
    names = ("config.json", "adapter_config.json", "*.safetensors")
    paths = [path for folder in folders for name in names for path in folder.glob(name)]
    return content_key({path.name: file_digest(path) for path in paths})


def _save(path: Path, values: NDArray[np.float32]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.npy")
    np.save(temporary, values)
    # Renamed when whole, sealed last: without its seal a file does not count, and is computed again.
    temporary.replace(path)
    write_seal(path)
