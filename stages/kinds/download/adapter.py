"""Import of a LoRA adapter that was trained elsewhere: checks that it fits its base model, and records predictions.

Its base is the artifact that the recipe names, once every layer is found there in its size. Predictions for a few texts
stand in for the record of a training, for merging and serving to compare with.
"""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.adapters.adapter import Adapter
from stages.adapters.files import check_weights, copy_companions, read_adapter
from stages.adapters.headers import CHANGES_THE_BASE, CONFIG_FILE, read_headers
from stages.core.contract import StageContext
from stages.core.errors import ModelError
from stages.core.files import read_json_object, write_atomically
from stages.engines.streamed import StreamedModel
from stages.models.loading import load_tokenizer
from stages.models.recorded import RecordedDocument, differences, write_record

HONOURED = {
    *(
        "peft_type",
        "task_type",
        "peft_version",
        "auto_mapping",
        "inference_mode",
        "base_model_name_or_path",
        "revision",
    ),
    *(
        "r",
        "rank_pattern",
        "lora_alpha",
        "alpha_pattern",
        "lora_dropout",
        "use_rslora",
        "fan_in_fan_out",
        "init_lora_weights",
        "eva_config",
    ),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("megatron_core", "qalora_group_size"),
}
"""Fields of PEFT's adapter_config.json that a downloaded adapter may set: those that are applied or have no effect."""
OF_THIS_STORE = re.compile(r"[a-z0-9][a-z0-9_-]*-[0-9a-f]{12}")
TEXTS = (
    "The quick brown fox jumps over the lazy dog, and then it goes home to sleep.",
    "def add(a, b):\n    return a + b\n\nprint(add(12, 34))",
    "Question: What is 12 + 34? Answer: 12 + 34 = 46.",
    "In 1969, three people flew to the moon; two of them walked on it.",
)
"""Texts for which a downloaded adapter's predictions are recorded, to compare a merged or served model with."""
LEAST_CHANGE_NATS = 1e-6
"""Smallest mean change of a token's log-probability, in nats, that shows an adapter's effect; less is fp32 rounding."""
NUM_NAMED = 5


def import_adapter(folder: Path, base: Path, context: StageContext, *, trust_remote_code: bool) -> None:
    """Turn a PEFT adapter in `folder` into one of the base model artifact `base`; raise ModelError if it cannot be."""
    _check_config(read_headers(folder).config, folder)
    adapter = read_adapter(folder)
    if not adapter.is_sum:
        raise ModelError(
            f"the adapter in {folder} has DoRA or whole modules; merge it where it was trained, and take that"
        )
    if OF_THIS_STORE.fullmatch(adapter.base) and adapter.base != base.name:
        raise ModelError(
            f"the adapter in {folder} was trained on {adapter.base}, not on {base.name}; name the stage that "
            "makes that as `base`, as the recipe has it that trained it (a download of a copy is another model)"
        )
    check_weights(adapter, base / "model")
    context.milestone(
        f"an adapter of rank {adapter.rank} on {len(adapter.factors)} layers, by its file of "
        f"{adapter.base or 'a model without a name'}; every layer is found in {base.name}"
    )
    config = {**read_json_object(folder / CONFIG_FILE), "base_model_name_or_path": base.name}
    write_atomically(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
    copy_companions(base / "model", folder)
    write_record(context.work, _predicted(adapter, base / "model", context, trust_remote_code), "float32")


def _check_config(config: Mapping[str, Any], folder: Path) -> None:
    """Raise ModelError if an adapter's config sets options that would be silently ignored here."""
    odd = sorted(f"{name}: {value}" for name, value in config.items() if value and name not in HONOURED)
    odd = [option for option in odd if option != "bias: none"]
    initialization = str(config.get("init_lora_weights")).lower()
    if initialization.startswith(CHANGES_THE_BASE):
        odd.append(f"init_lora_weights: {initialization}, which has changed its base")
    if config.get("peft_type") != "LORA" or odd:
        raise ModelError(
            f"the adapter in {folder} is a {config.get('peft_type')} with {', '.join(odd[:NUM_NAMED]) or 'layers'}; "
            "expected a plain LoRA of linear layers. Merge it where it was trained, and take the model"
        )


def _predicted(adapter: Adapter, base: Path, context: StageContext, trust_remote_code: bool) -> list[RecordedDocument]:
    """Return texts with predictions of base and adapter; raise ModelError if the adapter changes nothing."""
    tokenizer = load_tokenizer(base, trust_remote_code=trust_remote_code)
    rows = [tokenizer(text).input_ids for text in TEXTS]
    unread = [RecordedDocument(row[:-1], row[1:], 0.0) for row in rows]  # each token's target is the next one
    model = StreamedModel(base, context.scratch / "base", trust_remote_code=trust_remote_code)
    without = [
        document.recording(base_alone) for document, base_alone in zip(unread, model.predictions(unread), strict=True)
    ]
    model.put_beside(adapter)
    with_adapter = model.predictions(unread)
    shutil.rmtree(context.scratch)
    if not differences(with_adapter, without).most > LEAST_CHANGE_NATS:  # unlike `<=`, this refuses NaN, too
        raise ModelError(
            f"the adapter does nothing: {len(TEXTS)} texts have the log-probabilities that {base.parent.name} alone "
            "gives them; it was written before it had learned, or its B was lost"
        )
    return [document.recording(predicted) for document, predicted in zip(unread, with_adapter, strict=True)]
