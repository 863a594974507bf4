"""Check of an exported model: it is another than training started from, and predicts what the trained one predicted.

Plain Transformers loads the exported folder on the CPU in fp32, after the engine has freed its own model, and repeats
the shortest recorded documents. Models too large for that are compared with their start alone, tensor by tensor up to
the first that differs. Adapters are judged elsewhere: by loading, by their effect, and once merged by all documents.
"""

from pathlib import Path

import torch
from safetensors import safe_open

from stages.core.contract import StageContext
from stages.core.errors import ModelError
from stages.kinds.train.config import TrainConfig
from stages.models.recorded import RecordedDocument, read_record
from stages.models.weight_files import read_tensors, weight_paths
from stages.parallel.host_memory import available_host_bytes

MOST_BYTES = 16 * 2**30
"""Largest size in fp32 of a model that is loaded for this."""
MOST_TOKENS = 512
BOUNDS_NATS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1}
"""Largest mean |Δ log-probability| of a token, in nats, that counts as rounding, by the coarser dtype of the engine's
products and of the exported weights."""
DIFFERENCE = "export_difference"


def check_exported(config: TrainConfig, context: StageContext, start: Path, compute_dtype: str) -> dict[str, float]:
    """Refuse an export that equals the model folder `start`, or predicts something else; return the difference.

    Called on rank 0; no process waits. An adapter passes.
    """
    if config.adapter:
        return {}
    folder = context.work / config.product
    if not differs(folder, start):
        context.refuse(
            ModelError(
                f"the exported model equals the one that training started from: no element of its weights is another "
                f"number in {config.export_dtype}; raise learning_rate or the steps, or write float32 (`export_dtype`)"
            )
        )
    dtypes = {compute_dtype, config.export_dtype} - {"float32"} or {"float32"}
    num_bytes = sum(path.stat().st_size for path in weight_paths(folder))
    most_bytes = min(MOST_BYTES, available_host_bytes() / 2)  # the other half is for what runs beside it
    fits = num_bytes * 4 / getattr(torch, config.export_dtype).itemsize <= most_bytes
    if config.precision == "fp8" or config.learning.needs_score_head or not fits:
        return {}
    from stages.engines.streamed import StreamedModel  # and Transformers, before what it does without is hidden

    documents = _short(read_record(context.work))
    model = StreamedModel(folder, context.scratch, trust_remote_code=config.trust_remote_code, from_disk=False)
    differences = [
        abs(now - before)
        for predicted, one in zip(model.predictions(documents), documents, strict=True)
        for now, before in zip(predicted.log_probabilities, one.log_probabilities, strict=True)
    ]
    difference, bound = sum(differences) / max(1, len(differences)), max(BOUNDS_NATS[dtype] for dtype in dtypes)
    if not difference <= bound:  # not `>`: NaN must fail, too
        context.refuse(
            ModelError(
                f"Transformers with the exported weights gives log-probabilities that are {difference:.3g} nats a "
                f"token from those of the model at the end of training; at most {bound:g} is rounding in "
                f"{' and '.join(sorted(dtypes))}. The files hold other weights than were trained; report this with the "
                "model's name"
            )
        )
    return {DIFFERENCE: difference}


def differs(folder: Path, start: Path) -> bool:
    """Return whether a weight of two model folders differs in the dtype of the first, or only one folder has it."""
    before = {tensor.name: path for path in weight_paths(start) for tensor in read_tensors(path)}
    names = set()
    for path in weight_paths(folder):
        with safe_open(path, framework="pt") as written:
            for name in written.keys():  # noqa: SIM118 (no mapping)
                names.add(name)
                if name not in before:
                    return True
                with safe_open(before[name], framework="pt") as file:
                    weight = written.get_tensor(name)
                    if not torch.equal(weight, file.get_tensor(name).to(weight.dtype)):
                        return True
    return names != before.keys()


def _short(documents: list[RecordedDocument]) -> list[RecordedDocument]:
    """Return the shortest documents with targets, at least one, of few tokens together."""
    chosen: list[RecordedDocument] = []
    num_tokens = 0
    for document in sorted((one for one in documents if one.num_targets), key=lambda one: len(one.input_ids)):
        num_tokens += len(document.input_ids)
        if chosen and num_tokens > MOST_TOKENS:
            break
        chosen.append(document)
    return chosen
