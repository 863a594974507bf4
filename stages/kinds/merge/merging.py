"""Merging of LoRA adapters: adds the matrix product B A to a model's weights, one weight matrix at a time.

Several adapters are first combined to one, as PEFT's `add_weighted_adapter` does it, layer by layer.

Checked are: every adapted layer is in the model's files, before anything is written; some weight changes by more than
the rounding takes away again; and the merged model gives the recorded documents the log-probabilities that the training
engine gave them, or, for a mixture, that the base gives with the mixture beside it (`compare`). A model that fails the
latter two is kept, and refused.
"""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from stages.adapters.adapter import Adapter
from stages.adapters.effect import Changing, changing, merged_weight
from stages.adapters.files import copy_companions, read_adapter
from stages.adapters.headers import ADAPTER_FOLDER
from stages.core.contract import StageContext, StageResult
from stages.core.errors import GateError, ModelError
from stages.engines.export import copy_all_but_weights
from stages.engines.streamed import StreamedModel, by_document, targets_of
from stages.kinds.merge.config import MergeConfig
from stages.models.facts import ModelFacts
from stages.models.model_folder import check_model_folder
from stages.models.recorded import (
    RECORD,
    Predicted,
    RecordedDocument,
    differences,
    read_record,
    read_tool_prompts,
    write_record,
)
from stages.models.weight_files import WEIGHTS_INDEX, read_tensors, weight_paths

NUM_NAMED = 5


def merge(config: MergeConfig, context: StageContext) -> StageResult:
    """Merge adapters into their base model, and compare the result with predictions that training recorded.

    Raises ModelError for files that do not fit together, or a result that differs too much or not at all.
    """
    base, trained = context.inputs[config.model] / "model", [context.inputs[name] for name in config.weighted]
    check_model_folder(ModelFacts(base))
    documents = read_record(trained[0])  # recorded with the first adapter; a mixture uses their tokens alone
    adapters = {name: _read(context.inputs[name], base.parent.name) for name in config.weighted}
    beside = StreamedModel(
        base,
        context.scratch / "base",
        trust_remote_code=config.trust_remote_code,
        processor=context.work / "model",  # with the bounds of pictures that training had
    )
    layers = beside.ordered({layer for artifact in adapters.values() for layer in artifact.layers})
    if config.is_plain:
        (adapter,) = adapters.values()
    else:
        from stages.kinds.merge.merging import combine  # imports PEFT, in over a second

        adapter = combine(adapters, config, layers)
    changes = changing(adapter, beside.causal_lm)
    _check_stored(changes, base)
    changed_fraction = _write(changes, base, trained[0], context)
    context.doing("comparing with what training recorded")
    merged = StreamedModel(
        context.work / "model", context.scratch / "merged", trust_remote_code=config.trust_remote_code
    )
    if adapter.is_sum:
        beside.put_beside(adapter)
    comparison = compare(merged, beside if adapter.is_sum else None, documents)
    metrics = _judged(comparison, config, trained[0], context)
    shutil.rmtree(context.scratch)
    metrics |= {"merged_layers": float(len(adapter.factors)), "changed_fraction": changed_fraction}
    context.log_metrics(0, metrics)
    _check_differences(metrics, config, context)
    context.milestone(
        f"merged {len(adapter.factors)} layers; log-probabilities differ by "
        f"{metrics['max_abs_logprob_difference']:.2g} nats per token at most"
    )
    tags = {"adapter": ", ".join(artifact.name for artifact in trained), "base": base.parent.name}
    return StageResult(metrics=metrics, tags=tags)


def _read(trained: Path, base: str) -> Adapter:
    adapter = read_adapter(trained / ADAPTER_FOLDER)
    if adapter.base != base:
        raise ModelError(f"merging {trained.name} into {base}: it was trained on {adapter.base or 'no artifact'}")
    return adapter


def _check_stored(changes: Changing, base: Path) -> None:
    """Raise ModelError unless the model's files hold every weight that the adapter changes."""
    stored = {tensor.name for path in weight_paths(base) for tensor in read_tensors(path)}
    if lost := sorted(set(changes) - stored):
        raise ModelError(
            f"merging: {len(lost)} of {len(changes)} adapted weights are not in the model's files "
            f"({', '.join(lost[:NUM_NAMED])}), so their part of the adapter would be lost; merge it into the model "
            "that it was trained on"
        )


def _write(changes: Changing, base: Path, trained: Path, context: StageContext) -> float:
    """Write the merged model; return the share of adapted numbers that changed.

    Files are copied and overwritten in place, so that one weight at a time is in memory.
    """
    folder = context.work / "model"
    copy_all_but_weights(base, folder)
    copy_companions(trained / ADAPTER_FOLDER, folder)
    if (base / WEIGHTS_INDEX).is_file():
        shutil.copyfile(base / WEIGHTS_INDEX, folder / WEIGHTS_INDEX)
    changed: dict[str, float] = {}
    for path in weight_paths(base):
        shutil.copyfile(path, folder / path.name)
        with safe_open(path, framework="pt") as file, (folder / path.name).open("r+b") as written:
            for tensor in read_tensors(path):
                if tensor.name in changes:
                    weight = file.get_tensor(tensor.name)
                    merged = merged_weight(changes, tensor.name, weight)
                    changed[tensor.name] = int((merged != weight).count_nonzero()) / weight.numel()
                    # In place: shape and dtype stay, so the file's header does, too. As bytes: numpy has no bf16.
                    written.seek(tensor.start)
                    written.write(merged.view(torch.uint8).numpy())
                    context.progress(len(changed), len(changes), "weights", "merging")
    _check_changed(changed, context)
    return sum(changed.values()) / len(changed)


def _check_changed(changed: Mapping[str, float], context: StageContext) -> None:
    """Fail the merge stage if rounding undid every change to the weights; warn if only some matrices did not change.

    changed: share of changed elements by weight name. How much is lost in all, the comparison measures.
    """
    unchanged = sorted(name for name, share in changed.items() if not share)
    if not unchanged:
        return
    lost = (
        f"merging: {len(unchanged)} of {len(changed)} adapted weights are as they were after rounding "
        f"({', '.join(unchanged[:NUM_NAMED])})"
    )
    if len(unchanged) < len(changed):
        context.warn(f"{lost}; their part of the adapter is lost")
    else:
        context.refuse(ModelError(f"{lost}: the adapter would be lost; train longer, or export the base in fp32"))


@dataclass(frozen=True)
class MergeComparison:
    """Comparison of a merged model's predictions with those of its base model with the unmerged adapter.

    given: of the merged model. expected: of the base with the adapter, over all targets; None if uncomputable.
    """

    documents: list[RecordedDocument]
    given: list[Predicted]
    expected: list[Predicted] | None = None
    kl_nats_per_token: float = 0.0
    same_choice_fraction: float = 1.0

    @property
    def expected_documents(self) -> list[RecordedDocument]:
        """Recorded documents with predictions of base and unmerged adapter instead of those that training recorded."""
        assert self.expected is not None, "of a mixture, which is compared with its parts"
        return [document.recording(one) for document, one in zip(self.documents, self.expected, strict=True)]

    def metrics(self) -> dict[str, float]:
        """Return KL divergence and share of equal greedy choices against the unmerged model, as for a quantization."""
        if self.expected is None:
            return {}
        return {"kl_nats_per_token": self.kl_nats_per_token, "same_choice_fraction": self.same_choice_fraction}


def compare(
    merged: StreamedModel, expected: StreamedModel | None, documents: Sequence[RecordedDocument]
) -> MergeComparison:
    """Return KL(unmerged ‖ merged) and greedy choices: the merged model against its base with the adapter beside it.

    Both models run from their files, in fp32, so that only the weights' rounding distinguishes them.
    """
    targets = targets_of(documents)
    models = [merged, *([expected] if expected else [])]
    hidden = [model.hidden_states(documents) for model in models]
    values: list[list[Tensor]] = [[] for _ in models]
    greedy: list[list[Tensor]] = [[] for _ in models]
    kl_nats = 0.0
    for chunk in torch.arange(len(targets)).split(merged.chunk_tokens):
        rows = [model.log_probabilities(state[chunk]) for model, state in zip(models, hidden, strict=True)]
        for number, row in enumerate(rows):
            values[number].append(row.gather(1, targets[chunk, None]).squeeze(1))  # [chunk]: ln p of each target
            greedy[number].append(row.argmax(1))
        q, p = rows[0], rows[-1]  # the same for one model, whose KL is 0
        kl_nats += (p.exp() * (p - q)).sum().item()
    predicted = [
        by_document(torch.cat(of_model), torch.cat(chosen), documents)
        for of_model, chosen in zip(values, greedy, strict=True)
    ]
    same = (torch.cat(greedy[0]) == torch.cat(greedy[-1])).float().mean().item()
    return MergeComparison(
        list(documents), predicted[0], predicted[1] if expected else None, kl_nats / len(targets), same
    )


def _judged(comparison: MergeComparison, config: MergeConfig, trained: Path, context: StageContext) -> dict[str, float]:
    """Return metrics of a merged model's difference from the unmerged adapter; store the latter's predictions."""
    documents = comparison.documents
    if config.is_plain:
        shutil.copyfile(trained / RECORD, context.work / RECORD)
    else:
        documents = comparison.expected_documents
        write_record(context.work, documents, "float32", read_tool_prompts(trained))
    return {**differences(comparison.given, documents).metrics(), **comparison.metrics()}


def _check_differences(metrics: dict[str, float], config: MergeConfig, context: StageContext) -> None:
    mean = metrics["mean_abs_logprob_difference"]
    if not mean <= config.max_difference:  # unlike `>`, this refuses NaN, too
        expected = "than training did" if config.is_plain else "than its base with the adapters beside it"
        context.refuse(
            GateError(
                f"the merged model gives documents other log-probabilities {expected}, by {mean:.3g} nats per token, "
                f"more than max_difference, {config.max_difference}; merge into a model in fp32, or raise it"
            )
        )


def combine(adapters: Mapping[str, Adapter], config: MergeConfig, layers: Sequence[str]) -> Adapter:
    """Combine several LoRA adapters into one, by the config's method and weights.

    dare_… draws elements in the order of `layers`. As in PEFT, each matrix is multiplied by √(weight × scaling), with
    the sign on A. Raises ModelError for adapters of several ranks.
    """
    if odd := [name for name, adapter in adapters.items() if not adapter.is_sum]:
        raise ModelError(
            f"combining adapters: {odd[0]} has DoRA or whole modules, which no sum has, or adapters of experts, which "
            "are not combined here; merge it alone"
        )
    from peft.utils import merge_utils  # over a second, which a merge of one adapter does without

    density = config.density or 1.0
    sums: dict[str, Callable[..., Tensor]] = {
        "linear": merge_utils.task_arithmetic,
        "ties": partial(merge_utils.ties, density=density),
        "dare_linear": partial(merge_utils.dare_linear, density=density),
        "dare_ties": partial(merge_utils.dare_ties, density=density),
    }
    factors = {}
    # dare_… draws from torch's global generator, which gets its state back afterwards.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        for layer in layers:
            on_layer = {name: adapter for name, adapter in adapters.items() if layer in adapter.factors}
            _check_ranks({name: len(adapter.factors[layer][0]) for name, adapter in on_layer.items()}, layer)
            counts = [config.weighted[name] * adapter.scaling_of(layer) for name, adapter in on_layer.items()]
            pairs = [tuple(factor.float() for factor in adapter.factors[layer]) for adapter in on_layer.values()]
            factors[layer] = _summed(pairs, counts, sums[config.combination])
    any_of_them = next(iter(adapters.values()))
    return Adapter(any_of_them.base, factors, scaling=1.0, is_transposed=any_of_them.is_transposed)


def _check_ranks(ranks: Mapping[str, int], layer: str) -> None:
    if len(set(ranks.values())) > 1:
        found = ", ".join(f"{name} has {rank}" for name, rank in ranks.items())
        raise ModelError(f"combining adapters: expected the same rank, but {found} on {layer}; train them with one")


def _summed(
    pairs: Sequence[tuple[Tensor, ...]], counts: Sequence[float], summed: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """Return one layer's combined LoRA matrices, A [rank, in] and B [out, rank], as weighted sums over the adapters."""
    # A root on both sides, so that the product B A gets the whole count.
    roots = torch.tensor([math.sqrt(abs(count)) for count in counts])
    signs = torch.tensor([math.copysign(1, count) for count in counts])
    a, b = zip(*pairs, strict=True)
    return summed(list(a), roots * signs), summed(list(b), roots)
