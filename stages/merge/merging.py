"""Merging: a model and adapters → the model with B A added to its weights, one weight at a time.

What it claims is checked: every adapted layer is found in the model's files, its weight changes by more than the
rounding takes away again, and the merged model gives the recorded documents what the training engine gave them, or,
for a mixture of several adapters, what the base gives with the mixture beside it (`compare.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from stages.adapters.adapter import Adapter
from stages.adapters.experts import ChangedParameters
from stages.adapters.files import copy_companions, read_adapter
from stages.adapters.headers import ADAPTER_FOLDER
from stages.core.contract import StageContext, StageResult
from stages.core.errors import GateError, ModelError
from stages.engines.export import copy_all_but_weights
from stages.engines.streamed import StreamedModel
from stages.merge.compare import Comparison, compare
from stages.merge.config import MergeConfig
from stages.models.model_folder import check_model_folder
from stages.models.recorded import RECORD, differences, read_record, write_record
from stages.models.weight_files import WEIGHTS_INDEX, read_tensors, weight_paths

NUM_NAMED = 5


def merge(config: MergeConfig, context: StageContext) -> StageResult:
    """Merge, and compare with what training recorded. Raises ModelError for files that do not belong together."""
    base, trained = context.inputs[config.model] / "model", [context.inputs[name] for name in config.weighted]
    check_model_folder(base)
    adapters = {name: _read(context.inputs[name], base.parent.name) for name in config.weighted}
    beside = StreamedModel(base, context.scratch / "base", trust_remote_code=config.trust_remote_code)
    layers = beside.ordered({layer for one in adapters.values() for layer in one.layers})
    adapter = next(iter(adapters.values())) if config.is_plain else _combined(adapters, config, layers)
    parameters = ChangedParameters(adapter, beside.causal_lm)
    changed_fraction = _write(adapter, parameters, base, trained[0], context)
    context.doing("comparing with what training recorded")
    merged = StreamedModel(
        context.work / "model", context.scratch / "merged", trust_remote_code=config.trust_remote_code
    )
    if adapter.is_sum:
        beside.put_beside(adapter)
    found = compare(merged, beside if adapter.is_sum else None, read_record(trained[0]))
    metrics = _judged(found, config, trained[0], context)
    shutil.rmtree(context.scratch)
    metrics |= {"merged_layers": float(len(adapter.factors)), "changed_fraction": changed_fraction}
    context.log_metrics(0, metrics)
    _check_differences(metrics, config)
    context.milestone(
        f"merged {len(adapter.factors)} layers; log-probabilities differ by "
        f"{metrics['max_abs_logprob_difference']:.2g} nats per token at most"
    )
    tags = {"adapter": ", ".join(one.name for one in trained), "base": base.parent.name}
    return StageResult(metrics=metrics, tags=tags)


def _combined(adapters: Mapping[str, Adapter], config: MergeConfig, layers: list[str]) -> Adapter:
    from stages.merge.combine import combine  # and PEFT, in over a second

    return combine(adapters, config, layers)


def _read(trained: Path, base: str) -> Adapter:
    adapter = read_adapter(trained / ADAPTER_FOLDER)
    if adapter.base != base:
        raise ModelError(f"merging {trained.name} into {base}: it was trained on {adapter.base or 'no artifact'}")
    return adapter


def _write(adapter: Adapter, parameters: ChangedParameters, base: Path, trained: Path, context: StageContext) -> float:
    """Write the merged model; returns which share of the merged weights are other numbers than before.

    Each file is copied, and the adapted weights in it written over, so that one of them at a time is in memory. Raises
    ModelError for a weight that is not found, or is what it was.
    """
    folder = context.work / "model"
    copy_all_but_weights(base, folder)
    copy_companions(trained / ADAPTER_FOLDER, folder)
    if (base / WEIGHTS_INDEX).is_file():
        shutil.copyfile(base / WEIGHTS_INDEX, folder / WEIGHTS_INDEX)
    changing: dict[str, Adapter | ChangedParameters] = dict.fromkeys(parameters.layers, parameters)
    changing |= dict.fromkeys(adapter.weights, adapter)
    changed: dict[str, float] = {}
    for path in weight_paths(base):
        shutil.copyfile(path, folder / path.name)
        with safe_open(path, framework="pt") as file, (folder / path.name).open("r+b") as written:
            for tensor in read_tensors(path):
                if tensor.name in changing:
                    weight = file.get_tensor(tensor.name)
                    merged = changing[tensor.name].merged(tensor.name, weight).to(weight.dtype).contiguous()
                    changed[tensor.name] = int((merged != weight).count_nonzero()) / weight.numel()
                    written.seek(tensor.start)
                    written.write(merged.view(torch.uint8).numpy())
                    context.progress(len(changed), len(changing), "weights", "merging")
    _check_changed(changing, changed)
    return sum(changed.values()) / len(changed)


def _check_changed(expected: Collection[str], changed: Mapping[str, float]) -> None:
    lost = sorted(set(expected) - set(changed))
    unchanged = sorted(name for name, share in changed.items() if not share)
    if lost or unchanged:
        raise ModelError(
            f"merging: {len(lost)} adapted weights are not in the model's files ({', '.join(lost[:NUM_NAMED])}), "
            f"{len(unchanged)} are as they were after rounding ({', '.join(unchanged[:NUM_NAMED])}): the adapter "
            "would be lost; train longer, or export the base in fp32"
        )


def _judged(found: Comparison, config: MergeConfig, trained: Path, context: StageContext) -> dict[str, float]:
    """Differences from what the model is to give; that is kept beside it for whatever is made of the model."""
    documents = found.documents
    if config.is_plain:
        shutil.copyfile(trained / RECORD, context.work / RECORD)
    else:
        documents = found.expected_documents
        write_record(context.work, documents, "float32")
    return {**differences(found.given, documents).metrics(), **found.metrics()}


def _check_differences(metrics: dict[str, float], config: MergeConfig) -> None:
    mean = metrics["mean_abs_logprob_difference"]
    if not mean <= config.max_difference:
        expected = "than training did" if config.is_plain else "than its base with the adapters beside it"
        raise GateError(
            f"the merged model gives documents other log-probabilities {expected}, by {mean:.3g} nats per token, more "
            f"than max_difference, {config.max_difference}; merge into a model in fp32, or raise it"
        )
