"""Quantizes a model folder with llm-compressor: model and calibration samples → a compressed-tensors folder.

Not AutoAWQ (`awq`, `autoawq`): it is archived, names llm-compressor as its successor, and on a CPU its default
`duo_scaling` silently corrupts the weights (a copy that it restores them from aliases the live tensor; the KL to the
unquantized model was 0.147 instead of 0.008).

Importing this module takes seconds; what can be checked without it is checked before.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from compressed_tensors import ModelCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.utils import patch_attr
from llmcompressor import oneshot
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedModel

from stages.core.files import write_atomically
from stages.models.model_folder import follow_file_mask
from stages.quantize.samples import batches_of_one_length
from stages.serving.quantization import Quantization

CALIBRATION_BATCH_TOKENS = 8192
SMOOTHING_STRENGTH = 0.8
"""Of activations against weights: what SmoothQuant's authors use for models of many outliers."""


def quantize(
    source: Path,
    target: Path,
    quantization: Quantization,
    samples: list[list[int]],
    *,
    seed: int,
    trust_remote_code: bool,
    report: Callable[[int, int], None],
) -> None:
    """As the protocol `Quantizer` says; `target` is in compressed-tensors' format."""
    torch.manual_seed(seed)
    # On a CPU in float32: bfloat16 products of small matrices took eight times as long there, and AWQ needs thousands.
    dtype = "auto" if torch.accelerator.is_available() else torch.float32
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, trust_remote_code=trust_remote_code)
    batches = [
        {"input_ids": batch, "attention_mask": torch.ones_like(batch)}
        for batch in batches_of_one_length(samples, CALIBRATION_BATCH_TOKENS)
    ]
    with _report_layers(model, report), _without_pinned_memory():
        oneshot(model=model, recipe=_modifiers(quantization), dataset=DataLoader(batches, batch_size=None))
    _save(model, source, target)


def _modifiers(quantization: Quantization) -> list[Modifier]:
    ignore = list(quantization.ignore)
    groups = {"group_0": _four_bit_groups(quantization)}
    match quantization.method:
        case "awq":
            # "both": half of the grid weighs activations alone, as AWQ was published, half the weights as well.
            return [AWQModifier(duo_scaling="both"), QuantizationModifier(config_groups=groups, ignore=ignore)]
        case "gptq":
            return [GPTQModifier(config_groups=groups, ignore=ignore)]
        case "int8":
            smoothing = SmoothQuantModifier(smoothing_strength=SMOOTHING_STRENGTH, ignore=ignore)
            return [smoothing, GPTQModifier(scheme="W8A8", ignore=ignore)]
        case "fp8":
            return [QuantizationModifier(scheme="FP8_DYNAMIC", ignore=ignore)]
        case unknown:
            raise AssertionError(f"the registry names {unknown} as a method of llm-compressor")


def _four_bit_groups(quantization: Quantization) -> QuantizationScheme:
    weights = QuantizationArgs(
        num_bits=4,
        type="int",
        strategy="group",
        group_size=quantization.group_size,
        symmetric=quantization.symmetric,
    )
    return QuantizationScheme(targets=["Linear"], weights=weights)


@contextmanager
def _without_pinned_memory() -> Iterator[None]:
    """llm-compressor 0.14 pins calibration batches whether or not there is a device to copy them to, which fails."""
    if torch.accelerator.is_available():
        yield
        return
    with patch_attr(IntermediatesCache, "pin_memory", lambda *_, **__: None):
        yield


@contextmanager
def _report_layers(model: PreTrainedModel, report: Callable[[int, int], None]) -> Iterator[None]:
    """Report how many of the model's blocks calibration has reached; it takes them one after the other."""
    blocks = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    reached = 0

    def reach(index: int) -> None:
        nonlocal reached
        if index >= reached:
            report(index, len(blocks))
            reached = index + 1

    hooks = [block.register_forward_hook(lambda *_, index=index: reach(index)) for index, block in enumerate(blocks)]
    yield
    for hook in hooks:
        hook.remove()


def _save(model: PreTrainedModel, source: Path, target: Path) -> None:
    dtype = _serving_dtype(source)
    ModelCompressor.from_pretrained_model(model).compress_model(model)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype is torch.float32:
            tensor.data = tensor.data.to(dtype)
    shutil.rmtree(target, ignore_errors=True)
    model.save_pretrained(target, max_shard_size="5GB")
    _set_dtype(target / "config.json", dtype)
    _copy_companions(source, target)
    for path in target.glob("*.safetensors"):
        follow_file_mask(path)


def _serving_dtype(source: Path) -> torch.dtype:
    """The source's own, or bfloat16 for float32, which vLLM's 4-bit kernels do not take."""
    config = json.loads((source / "config.json").read_text())
    text_config = config.get("text_config", config)
    name = text_config.get("dtype") or text_config.get("torch_dtype")
    return torch.float16 if name == "float16" else torch.bfloat16


def _set_dtype(path: Path, dtype: torch.dtype) -> None:
    """llm-compressor writes the source's config, which may say float32; vLLM computes in what it says."""
    config = json.loads(path.read_text())
    for part in (config, config.get("text_config", {})):
        part.pop("torch_dtype", None)
        part["dtype"] = str(dtype).removeprefix("torch.")
    write_atomically(path, json.dumps(config, indent=2))


def _copy_companions(source: Path, target: Path) -> None:
    """Tokenizer, chat template, generation config and whatever else lies beside the weights, unchanged."""
    for path in source.iterdir():
        weights = path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")
        if path.is_file() and not weights and path.name != "config.json":
            shutil.copy(path, target / path.name)
