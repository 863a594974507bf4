"""The merge stage: a model and an adapter → the model with B A added to its weights, one weight at a time.

What it claims is checked: every adapted layer is found in the model's files, its weight changes by more than the
rounding takes away again, and the merged model gives the recorded documents what the training engine gave them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from stages.adapters.files import Adapter, copy_companions, read_adapter
from stages.adapters.headers import ADAPTER_FOLDER
from stages.core.contract import StageContext, StageResult
from stages.core.errors import GateError, ModelError
from stages.engines.export import write_model
from stages.engines.recorded import differences_from_record
from stages.merge.config import MergeConfig
from stages.models.model_config import read_config
from stages.models.model_folder import check_model_folder
from stages.models.weight_files import weight_paths

NUM_NAMED = 5


def run(config: MergeConfig, context: StageContext) -> StageResult:
    """Merge, and compare with what training recorded. Raises ModelError for files that do not belong together."""
    base, trained = context.inputs[config.model] / "model", context.inputs[config.adapter]
    check_model_folder(base)
    adapter = read_adapter(trained / ADAPTER_FOLDER)
    if adapter.base != base.parent.name:
        raise ModelError(
            f"merging {trained.name} into {base.parent.name}: it was trained on {adapter.base or 'no artifact'}"
        )
    merging = _Merging(base, adapter)
    base_config = read_config(base)
    dtype = getattr(torch, base_config.get("dtype") or base_config.get("torch_dtype") or "float32")
    write_model(merging.weights(), source=base, folder=context.work / "model", dtype=dtype, tied=set())
    copy_companions(trained / ADAPTER_FOLDER, context.work / "model")
    metrics = {"merged_layers": float(len(adapter.factors)), "changed_fraction": merging.check()}
    disable_progress_bar()
    try:
        merged = AutoModelForCausalLM.from_pretrained(
            context.work / "model",
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ModelError(f"loading the merged model, to compare it with what training recorded: {error}") from error
    found = differences_from_record(merged, trained)
    metrics = {"max_abs_logprob_difference": found.most, "mean_abs_logprob_difference": found.mean, **metrics}
    context.log_metrics(0, metrics)
    if not found.mean <= config.max_difference:
        raise GateError(
            f"the merged model gives documents other log-probabilities than training did, by {found.mean:.3g} nats "
            f"per token, more than max_difference, {config.max_difference}; merge into a model in fp32, or raise it"
        )
    context.milestone(
        f"merged {len(adapter.factors)} layers; log-probabilities differ by {found.most:.2g} nats per token at most"
    )
    return StageResult(metrics=metrics, tags={"adapter": trained.name, "base": base.parent.name})


class _Merging:
    """The base's weights as they come out of its files, those with an adapter changed; counts what has changed."""

    def __init__(self, base: Path, adapter: Adapter) -> None:
        self._base, self._adapter = base, adapter
        self._num_changed: dict[str, float] = {}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name in the base's files → tensor in the base's dtype."""
        changed = self._adapter.weights
        for path in weight_paths(self._base):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    weight = file.get_tensor(name)
                    yield name, self._merged(name, weight) if name in changed else weight

    def check(self) -> float:
        """The share of the merged layers' weights that are other numbers now. Raises ModelError for a layer without."""
        lost = sorted(self._adapter.weights - set(self._num_changed))
        unchanged = sorted(layer for layer, changed in self._num_changed.items() if not changed)
        if lost or unchanged:
            raise ModelError(
                f"merging: {len(lost)} adapted weights are not in the model's files ({', '.join(lost[:NUM_NAMED])}), "
                f"{len(unchanged)} are as they were after rounding ({', '.join(unchanged[:NUM_NAMED])}): the adapter "
                "would be lost; train longer, or export the base in fp32"
            )
        return sum(self._num_changed.values()) / len(self._num_changed)

    def _merged(self, name: str, weight: Tensor) -> Tensor:
        merged = self._adapter.merged(name, weight).to(weight.dtype)
        self._num_changed[name] = (merged != weight).float().mean().item()
        return merged
