"""Quantization with llm-compressor (AWQ, GPTQ, int8, fp8) into a folder in compressed-tensors' format.

Not AutoAWQ (`awq`, `autoawq`): it is archived, names llm-compressor as its successor, and on a CPU its default
`duo_scaling` silently corrupts the weights (a copy that it restores them from aliases the live tensor; the KL to the
unquantized model was 0.147 instead of 0.008).

llm-compressor's own tables of what AWQ and SmoothQuant scale are by architecture: those of others end in an error, or
in a norm that feeds other layers than the table says. So its modifiers get what `scaling` found, by name. Importing
this module takes seconds; what can be checked without it is checked before.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors import ModelCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.utils import patch_attr
from llmcompressor import oneshot
from llmcompressor.modeling.moe.context import moe_calibration_context
from llmcompressor.modeling.moe.linearize import linearize_moe
from llmcompressor.modeling.offset_norm import norm_calibration_context
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
from llmcompressor.modifiers.transform.awq.base import get_lowest_common_ancestor_with_avoid
from llmcompressor.modifiers.transform.awq.mappings import ResolvedMapping
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform.smoothquant.base import SmoothQuantMapping
from llmcompressor.pipelines.cache import IntermediatesCache
from llmcompressor.pipelines.sequential.helpers import SequentialTracer
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from stages.core.errors import ModelError
from stages.core.files import write_atomically
from stages.engines.export import ShardWriter
from stages.kinds.quantize.layers import (
    carried_by,
    ignored_by_servers,
    linear_layers,
    name_experts_as_stored,
    quantized_layers,
)
from stages.kinds.quantize.registry import QuantizationJob
from stages.kinds.quantize.samples import batches
from stages.kinds.quantize.scaling import Scaling, find_scalings
from stages.kinds.quantize.written import copy_companions, problems_of_written
from stages.models.carried_weights import read_carried
from stages.models.facts import CONFIG_FILE, ModelFacts
from stages.models.layers import text_layers
from stages.models.loaded_weights import dtype_of_weights
from stages.models.loading import head_of, load_config, load_model, load_tokenizer
from stages.models.model_folder import follow_file_mask
from stages.models.weight_files import weight_paths
from stages.serving.engine import Quantization

SMOOTHING_STRENGTH = 0.8
"""Strength of SmoothQuant's smoothing, the value that its authors use for models with many outliers."""
CALIBRATION_BATCH_TOKENS = 8192


def quantize(job: QuantizationJob) -> list[ModelError]:
    """Quantize a model with llm-compressor into compressed-tensors' format; returns problems found in the result."""
    source, quantization = job.source, job.quantization
    torch.manual_seed(job.seed)
    # float32 on a CPU: bfloat16 products of small matrices took eight times as long there, and AWQ needs thousands.
    dtype = "auto" if torch.accelerator.is_available() else torch.float32
    head = head_of(load_config(source, trust_remote_code=job.trust_remote_code))
    model = load_model(source, head=head, dtype=dtype, trust_remote_code=job.trust_remote_code)
    layers, quantized = linear_layers(model), quantized_layers(model, quantization)
    ignored = {name: layer.name for name, layer in layers.items() if name not in quantized}
    carried = carried_by(model, source)
    calibration = [inputs for _, inputs in batches(job.samples, CALIBRATION_BATCH_TOKENS, job.pictures)]
    if any(layer.is_expert for layer in quantized.values()):
        # In this order: the names in files are read from modules that `linearize_moe` replaces.
        name_experts_as_stored(model)
        linearize_moe(model)
    scalings = _scalings(model, quantization, calibration, set(quantized))
    modifiers = METHODS[quantization.method].modifiers(quantization, list(ignored), scalings)
    with (
        _report_layers(model, job.report),
        _without_pinned_memory(),
        _outputs_as_they_are(),
        _experts_as_they_are(),
        _fast_search(quantization),
    ):
        # Each item is a batch of token ids. Given no processor, it would look for one of images, too, and use none.
        dataset, tokenizer = DataLoader(calibration, batch_size=None), load_tokenizer(source)
        # A tower's layers stay as they are, so they need not be taken one at a time.
        one_at_a_time = {} if head == "tokens" else {"sequential_targets": _classes_of_layers(model)}
        oneshot(model=model, recipe=modifiers, dataset=dataset, processor=tokenizer, **one_at_a_time)
    _save(model, source, job.target, {*ignored, *ignored.values(), *ignored_by_servers(carried)})
    _add_carried(source, job.target, carried.keys())
    return list(problems_of_written(job.target, {layer.name for layer in quantized.values()}))


def _scalings(
    model: PreTrainedModel, quantization: Quantization, calibration: list[dict[str, torch.Tensor]], quantized: set[str]
) -> list[Scaling]:
    """Return pairs of layers that a method may scale; raise ModelError if one that does nothing else has none."""
    method = METHODS[quantization.method]
    if not method.scales:
        return []
    with norm_calibration_context(model), moe_calibration_context():
        scalings = find_scalings(model.eval(), calibration[0]["input_ids"], quantized)
    scaled = {name for scaling in scalings for name in scaling.readers} & quantized
    if method.searches and not scaled:
        raise ModelError(
            f"{quantization.method} scales a layer against the one before it, and {type(model).__name__} has no two "
            "layers that may be scaled without changing what it computes; choose method gptq, int8 or fp8"
        )
    print(f"the inputs of {len(scaled)} of {len(quantized)} layers can be scaled")
    return scalings


def _classes_of_layers(model: PreTrainedModel) -> list[str]:
    return sorted({type(layer).__name__ for layer in text_layers(model)})


def _four_bit_groups(quantization: Quantization) -> dict[str, QuantizationScheme]:
    weights = QuantizationArgs(
        num_bits=4,
        type="int",
        strategy="group",
        group_size=quantization.group_size,
        symmetric=quantization.symmetric,
    )
    return {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}


class AWQByName(AWQModifier):
    """Subclass of llm-compressor's AWQ that gets the layers to scale by name instead of searching for patterns."""

    def _set_resolved_mappings(self, model: nn.Module) -> None:
        modules, resolved = dict(model.named_modules()), dict[str, ResolvedMapping]()
        for mapping in self.mappings or ():
            names = list(mapping.balance_layers)
            parent_name, parent = get_lowest_common_ancestor_with_avoid(names, model)
            source = modules[mapping.smooth_layer]
            # AWQ replays a parent once, and forgets its inputs then: of two mappings with one parent, the first.
            resolved.setdefault(
                parent_name,
                ResolvedMapping(
                    mapping.smooth_layer, source, [modules[name] for name in names], names, parent, parent_name
                ),
            )
        self._resolved_mappings = list(resolved.values())


class SmoothQuantByName(SmoothQuantModifier):
    """Subclass of llm-compressor's SmoothQuant that gets the layers to scale by name."""

    def _resolve_mappings(self, model: nn.Module) -> list[SmoothQuantMapping]:
        modules = dict(model.named_modules())
        return [
            SmoothQuantMapping(source, modules[source], [modules[name] for name in readers])
            for readers, source in self.mappings or ()
        ]


def _awq(quantization: Quantization, ignore: list[str], scalings: list[Scaling]) -> list[Modifier]:
    mappings = [AWQMapping(scaling.source, list(scaling.readers)) for scaling in scalings]
    # "both": half of the grid weighs activations alone, as AWQ was published, half the weights as well.
    awq = AWQByName(mappings=mappings, duo_scaling="both")
    return [awq, QuantizationModifier(config_groups=_four_bit_groups(quantization), ignore=ignore)]


def _gptq(quantization: Quantization, ignore: list[str], _: list[Scaling]) -> list[Modifier]:
    return [GPTQModifier(config_groups=_four_bit_groups(quantization), ignore=ignore)]


def _int8(_: Quantization, ignore: list[str], scalings: list[Scaling]) -> list[Modifier]:
    norms = [(list(scaling.readers), scaling.source) for scaling in scalings if scaling.of_norm]
    smoothing = SmoothQuantByName(smoothing_strength=SMOOTHING_STRENGTH, mappings=norms)
    return [*([smoothing] if norms else []), GPTQModifier(scheme="W8A8", ignore=ignore)]


def _fp8(_: Quantization, ignore: list[str], __: list[Scaling]) -> list[Modifier]:
    return [QuantizationModifier(scheme="FP8_DYNAMIC", ignore=ignore)]


@dataclass(frozen=True)
class _Method:
    """Method of llm-compressor: the function that makes its modifiers (quantization steps), in order.

    modifiers: called with the names of modules to leave out, and with the pairs of layers that may be scaled. scales:
    it takes such pairs. searches: it searches their scales, and does nothing without any.
    """

    modifiers: Callable[[Quantization, list[str], list[Scaling]], list[Modifier]]
    scales: bool = False
    searches: bool = False


METHODS = {
    "awq": _Method(_awq, scales=True, searches=True),
    "gptq": _Method(_gptq),
    "int8": _Method(_int8, scales=True),
    "fp8": _Method(_fp8),
}


@contextmanager
def _experts_as_they_are() -> Iterator[None]:
    """Keep llm-compressor from splitting experts that stay unquantized, since it could not write them afterwards."""
    with patch_attr(sys.modules[oneshot.__module__], "get_non_linearized_moes", lambda _: []):
        yield


@contextmanager
def _fast_search(quantization: Quantization) -> Iterator[None]:
    """Use oneDNN instead of MKL on a CPU for the matrix products of AWQ's search, which take most of its time.

    So torch 2.13 reads `medium`: a product of 512 × 1536 by 1536 × 576 took 2.0 ms instead of 8.4 on AVX512, with
    errors of 2e-4 in sums of 40. With AMX, factors are rounded to bf16, sums are not. Other methods solve equations by
    their products, and keep all digits.
    """
    precision = torch.get_float32_matmul_precision()
    if METHODS[quantization.method].searches and not torch.accelerator.is_available():
        torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@contextmanager
def _without_pinned_memory() -> Iterator[None]:
    """Keep llm-compressor 0.14 from pinning calibration batches in memory, which fails on a machine without a GPU."""
    if torch.accelerator.is_available():
        yield
        return
    with patch_attr(IntermediatesCache, "pin_memory", lambda *_, **__: None):
        yield


@contextmanager
def _outputs_as_they_are() -> Iterator[None]:
    """Keep llm-compressor 0.14 from making plain dicts of outputs between a model's parts, which read their fields."""
    create = SequentialTracer.create_arg

    def create_arg(tracer: Any, value: Any) -> Any:
        if isinstance(value, ModelOutput):
            fields = {name: create_arg(tracer, one) for name, one in value.items()}
            return tracer.create_node("call_function", type(value), (), fields)
        return create(tracer, value)

    with patch_attr(SequentialTracer, "create_arg", create_arg):
        yield


@contextmanager
def _report_layers(model: PreTrainedModel, report: Callable[[int, int], None]) -> Iterator[None]:
    """Report progress: how many of the model's transformer blocks have been calibrated."""
    blocks = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    reached = 0

    def reach(index: int) -> None:
        nonlocal reached
        if index >= reached:
            # At a block's first call only: it is called once for each batch.
            report(index, len(blocks))
            reached = index + 1

    hooks = [block.register_forward_hook(lambda *_, index=index: reach(index)) for index, block in enumerate(blocks)]
    yield
    for hook in hooks:
        hook.remove()


def _save(model: PreTrainedModel, source: Path, target: Path, ignored: set[str]) -> None:
    dtype = _serving_dtype(source)
    # First: afterwards, quantized weights are float32 no more, and keep their types below.
    ModelCompressor.from_pretrained_model(model).compress_model(model)
    dtype_of = dtype_of_weights(model, dtype)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype is torch.float32:
            tensor.data = tensor.data.to(dtype_of(name))
    shutil.rmtree(target, ignore_errors=True)
    model.save_pretrained(target, max_shard_size="5GB")
    _complete_config(target, dtype, ignored)
    copy_companions(source, target)
    for path in target.glob("*.safetensors"):  # safetensors writes files that only their owner may read
        follow_file_mask(path)


def _add_carried(source: Path, target: Path, carried: Set[str]) -> None:
    """Write the weights that Transformers did not load into files of their own beside the quantized ones."""
    if not carried:
        return
    writer = ShardWriter(target)
    for path in weight_paths(target):
        writer.adopt(path)
    for name, weight in read_carried(source, carried):
        writer.add(name, weight)
    writer.finish()


def _serving_dtype(source: Path) -> torch.dtype:
    """Return the dtype of unquantized weights: the source's, but bfloat16 for float32 (vLLM's kernels lack it)."""
    config = ModelFacts(source).config
    text_config = config.get("text_config", config)
    name = text_config.get("dtype") or text_config.get("torch_dtype")
    return torch.float16 if name == "float16" else torch.bfloat16


def _complete_config(folder: Path, dtype: torch.dtype, ignored: set[str]) -> None:
    """Correct the quantized model's `config.json`: its dtype, and its list of layers that stay unquantized.

    llm-compressor writes the source's dtype, in which vLLM would compute, and module names only; vLLM looks ignored
    layers up by their names in files.
    """
    config = dict(ModelFacts(folder).config)
    for part in (config, config.get("text_config", {})):
        part.pop("torch_dtype", None)
        part["dtype"] = str(dtype).removeprefix("torch.")
    quantization = config.get("quantization_config", {})
    quantization["ignore"] = sorted({*quantization.get("ignore", ()), *ignored})
    write_atomically(folder / CONFIG_FILE, json.dumps(config, indent=2))
