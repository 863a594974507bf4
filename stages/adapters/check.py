"""Checks in seconds that an adapter fits a model, which is built on the meta device and named by its files' headers."""

from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file

from stages.adapters.config import AdapterConfig
from stages.adapters.files import NUM_NAMED, check_mergeable
from stages.adapters.headers import WEIGHTS_FILE
from stages.adapters.lora import add_adapter, changed_weights
from stages.adapters.quantized import quantizable_layers
from stages.core.errors import ModelError
from stages.models.loading import Head, model_without_weights


def check_adapter(causal_lm: Any, config: AdapterConfig, folder: Path, *, sees: bool = False) -> None:
    """Raise ModelError unless the adapter fits a model. folder: of its files. sees: as `add_adapter` has it."""
    add_adapter(causal_lm, config, seed=0, has_weights=False, sees=sees)
    check_mergeable(changed_weights(causal_lm), folder)
    if config.base_precision in ("nf4", "int8"):
        quantizable_layers(causal_lm, config.base_precision)


def loading_problem(folder: Path, base: Path, *, trust_remote_code: bool, head: Head = "tokens") -> ModelError | None:
    """Return an error unless an adapter's tensors fit `base` by name and shape; PEFT leaves out misfits silently."""
    causal_lm = model_without_weights(base, trust_remote_code=trust_remote_code, head=head)
    tensors = load_file(folder / WEIGHTS_FILE)
    try:
        model = PeftModel(causal_lm, PeftConfig.from_pretrained(str(folder)), low_cpu_mem_usage=True)
        places = {
            name: one.shape for name, one in get_peft_model_state_dict(model, save_embedding_layers=False).items()
        }
    except ValueError as error:
        return ModelError(f"writing the adapter in {folder}: PEFT cannot put it on {base}: {error}")
    odd = set(places) ^ set(tensors) | {
        name for name in set(places) & set(tensors) if places[name] != tensors[name].shape
    }
    if odd:
        return ModelError(
            f"writing the adapter in {folder}: PEFT, with the config beside it, would not load "
            f"{', '.join(sorted(odd)[:NUM_NAMED])} ({len(odd)} in all), or would miss it; it is of another model "
            f"than {base}"
        )
    return None
