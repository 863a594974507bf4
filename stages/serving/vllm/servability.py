"""Checks from layer shapes, before a model is quantized, that vLLM will be able to serve the quantized model.

The rules are those of the kernels that vLLM 0.32 selects, on the kind of device that this machine has:

- every layer: tensor parallelism divides heads, outputs of column-parallel and inputs of row-parallel layers evenly;
- 4 bits: a rank's share of the input is whole groups, and its outputs are packed by eights;
- 4 bits on a CPU (`CPUWNA16`): even groups, a rank's inputs and (fused) outputs in multiples of 32;
- 4 bits on CUDA: groups of 32, 64 or 128 (Marlin, which pads all else itself; 256 falls back to Triton), and for
  experts of a mixture a hidden size in multiples of 128;
- 8 bits: cutlass, oneDNN or a fallback of theirs takes any shape;
- experts of a mixture on a CPU: int4 and int8 need AMX and shapes in multiples of 32, int4 no zero points and another
  group size than 32; fp8 is served in blocks of 128 only, which no method here writes.

`caveats` warns of what shapes do not show: what a CPU of this kind does to the served model.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from stages.core.errors import RecipeError
from stages.models.linear_layers import EXPERTS, Projection, Split
from stages.serving.engine import Quantization

Device = Literal["cpu", "cuda"]

GROUP_SIZES = (128, 64, 32)
"""Quantization group sizes that vLLM serves on every device, the best compression first."""
CHANGES: list[dict[str, Any]] = [
    {"symmetric": True},
    *({"group_size": size} for size in GROUP_SIZES),
    *({"group_size": size, "symmetric": True} for size in GROUP_SIZES),
]
"""Changes of a quantize stage's config that may make its model servable, in the order in which they are tried."""
CUDA_GROUP_SIZES = (32, 64, 128, 256)
CUDA_EXPERT_GROUP_SIZES = (32, 64, 128)
PACKED = 8
"""Number of 4-bit zero points that are packed into one int32."""


@dataclass(frozen=True)
class AttentionHeads:
    """Numbers of query and key heads of a model; tensor parallelism gives each process whole heads."""

    queries: int
    keys: int

    @classmethod
    def of(cls, model_config: Mapping[str, Any]) -> AttentionHeads | None:
        """Return the (language model's) head numbers in a `config.json`, or None if it has none."""
        text_config = model_config.get("text_config", model_config)
        queries = text_config.get("num_attention_heads")
        return cls(queries, text_config.get("num_key_value_heads") or queries) if queries else None


@dataclass(frozen=True)
class Problem:
    """Layer that vLLM could not serve once it is quantized, and the reason."""

    layer: str
    reason: str


def serving_device() -> Device:
    """Return the kind of device, `cpu` or `cuda`, that vLLM would use on this machine."""
    gpus = Path("/proc/driver/nvidia/gpus")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "cuda" if gpus.is_dir() and any(gpus.iterdir()) and not hidden else "cpu"


def check_servable(
    projections: list[Projection],
    heads: AttentionHeads | None,
    quantization: Quantization,
    device: Device,
    flags: Collection[str] = (),
) -> None:
    """Raise RecipeError, with layers, reasons and a remedy, for an unservable model. flags: the serving CPU's."""

    def problems_of(changed: Quantization) -> list[Problem]:
        return list(_problems(projections, heads, changed, device, flags))

    if problems := problems_of(quantization):
        raise RecipeError(_explain(problems, _advice(projections, quantization, problems_of), quantization, device))


def caveats(quantization: Quantization, device: Device, cpu_flags: set[str]) -> list[str]:
    """Return warnings about a quantized model that can be served, but with larger errors or more memory than
    promised.
    """
    if device == "cuda" or not cpu_flags:
        return []
    if quantization.weights == "int8" and not cpu_flags & {"avx512_vnni", "avx_vnni"}:
        return [
            "this CPU has no VNNI instructions, and vLLM's int8 products overflow without them (an error of 13% was "
            "measured); serve the model elsewhere, or choose another method"
        ]
    if quantization.weights == "int4" and "avx512f" not in cpu_flags:
        return ["this CPU has no AVX-512, and vLLM unpacks 4-bit weights to 16 bits in memory without it"]
    return []


def cpu_flags() -> set[str]:
    """Return the instruction sets of this machine's CPU, such as `avx512f`; none if the system does not list them."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return set(next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split())


def _problems(
    projections: list[Projection],
    heads: AttentionHeads | None,
    quantization: Quantization,
    device: Device,
    flags: Collection[str],
) -> Iterator[Problem]:
    layers = quantization.layers(projections)
    yield from _split_evenly(layers, heads, quantization.tensor_parallel_size)
    yield from _quantized_together(projections, layers)
    if quantization.weights == "int4":
        yield from _four_bit_shapes(layers, heads, quantization, device)
    yield from _experts(layers, quantization, device, flags)


def _experts(
    layers: list[Projection], quantization: Quantization, device: Device, flags: Collection[str]
) -> Iterator[Problem]:
    reason = _unread_by_transformers(quantization)
    if device == "cpu":
        reason = reason or _no_cpu_kernel(quantization, flags)
    if reason:
        yield from (Problem(layer.name, reason) for layer in layers if layer.is_expert)


def _unread_by_transformers(quantization: Quantization) -> str | None:
    """Return why Transformers 5.17, which measures the error, cannot read the quantized experts (vLLM can)."""
    if quantization.weights == "int8":
        return "Transformers reads no int8 experts, and the KL is measured with it"
    if quantization.weights == "int4" and not quantization.symmetric:
        return "Transformers reads no zero points of experts, and the KL is measured with it"
    return None


def _no_cpu_kernel(quantization: Quantization, flags: Collection[str]) -> str | None:
    """Return why vLLM has no kernel for these quantized experts on this CPU; None if it has one."""
    if quantization.weights == "fp8":
        return "vLLM has no kernel for fp8 experts on a CPU"
    if "amx_tile" not in flags:
        return "vLLM serves quantized experts on CPUs with AMX only, which this one lacks"
    if quantization.group_size == 32:
        return "vLLM serves experts with a group_size of 32 on no CPU"
    return None


def _split_evenly(layers: list[Projection], heads: AttentionHeads | None, ranks: int) -> Iterator[Problem]:
    # Fewer ranks than key heads divide these evenly; of more ranks, several share a copy of a head.
    if heads and (heads.queries % ranks or (heads.keys % ranks and ranks % heads.keys)):
        found = f"{heads.queries} query and {heads.keys} key heads cannot be divided between {ranks} ranks"
        yield Problem("every attention layer", found)
    for layer in layers:
        size = layer.input_size if layer.split is Split.INPUT else layer.output_size
        if layer.split is not Split.NOTHING and size % ranks and not _is_replicated(layer, heads, ranks):
            yield Problem(layer.name, f"its {layer.split.value} of {size} cannot be divided between {ranks} ranks")


def _quantized_together(projections: list[Projection], layers: list[Projection]) -> Iterator[Problem]:
    """Yield layers that vLLM fuses into one matrix, such as q, k and v, if only some of them are quantized."""
    kept = {layer.name for layer in layers}
    for name, group in _by_fused_name(projections).items():
        ignored = [layer.name for layer in group if layer.name not in kept]
        if ignored and len(ignored) < len(group):
            reason = f"vLLM fuses {name.rpartition('.')[2]}, and only some of them are ignored; ignore all or none"
            yield Problem(ignored[0], reason)


def _four_bit_shapes(
    layers: list[Projection], heads: AttentionHeads | None, quantization: Quantization, device: Device
) -> Iterator[Problem]:
    group_size, ranks = quantization.group_size, quantization.tensor_parallel_size
    for fused in _by_fused_name(layers).values():
        outputs = [_outputs_per_rank(layer, heads, ranks) for layer in fused]
        for layer, output_size in zip(fused, outputs, strict=True):
            input_size = layer.input_size // ranks if layer.split is Split.INPUT else layer.input_size
            if input_size % group_size:
                yield Problem(layer.name, f"a rank's input of {input_size} is no multiple of group_size {group_size}")
            if output_size % PACKED:
                yield Problem(layer.name, f"a rank's output of {output_size} is no multiple of {PACKED}")
            yield from _kernel_limits(layer, input_size, sum(outputs), group_size, device)


def _kernel_limits(
    layer: Projection, input_size: int, fused_output_size: int, group_size: int, device: Device
) -> Iterator[Problem]:
    if device == "cpu":
        if group_size % 2:
            yield Problem(layer.name, f"group_size {group_size} is odd")
        for side, size in (("input", input_size), ("fused output", fused_output_size)):
            if size % 32:
                yield Problem(layer.name, f"a rank's {side} of {size} is no multiple of 32")
        return
    allowed = CUDA_EXPERT_GROUP_SIZES if layer.is_expert else CUDA_GROUP_SIZES
    if group_size not in allowed:
        yield Problem(layer.name, f"group_size {group_size} is none of {', '.join(map(str, allowed))}")
    if layer.is_expert and layer.split is Split.OUTPUT and layer.input_size % 128:
        yield Problem(layer.name, f"its hidden size of {layer.input_size} is no multiple of 128")


def _outputs_per_rank(layer: Projection, heads: AttentionHeads | None, ranks: int) -> int:
    if layer.split is not Split.OUTPUT:
        return layer.output_size
    if _is_replicated(layer, heads, ranks) and heads:
        return layer.output_size // heads.keys  # one head
    return layer.output_size // ranks


def _is_replicated(layer: Projection, heads: AttentionHeads | None, ranks: int) -> bool:
    """Return whether tensor parallelism copies a key or value projection, having more processes than key heads."""
    return heads is not None and ranks > heads.keys and layer.suffix in ("k_proj", "v_proj")


def _by_fused_name(layers: list[Projection]) -> dict[str, list[Projection]]:
    groups: dict[str, list[Projection]] = defaultdict(list)
    for layer in layers:
        groups[layer.fused_name].append(layer)
    return groups


def _advice(
    projections: list[Projection], quantization: Quantization, problems_of: Callable[[Quantization], list[Problem]]
) -> str:
    """Return the smallest config change that makes the model servable, such as another group size, for an error."""
    for change in CHANGES if quantization.weights == "int4" else ():
        if not problems_of(replace(quantization, **change)):
            return "set " + " and ".join(f"{name}: {json.dumps(value)}" for name, value in change.items())
    blamed = {problem.layer for problem in problems_of(quantization)}
    blamed_layers = [layer for layer in projections if layer.name in blamed]
    if blamed_layers and all(layer.is_expert for layer in blamed_layers):
        return _advice_for_experts(quantization, problems_of)
    fused = {layer.fused_name.rpartition(".")[2] for layer in blamed_layers}
    suffixes = sorted({suffix for names in fused for suffix in names.split("+")})
    pattern = rf"re:.*\.({'|'.join(suffixes)})$"
    ignoring = replace(quantization, ignore=(*quantization.ignore, pattern))
    if suffixes and not problems_of(ignoring):
        return f"add '{pattern}' to ignore"
    return "choose a tensor_parallel_size that divides the model, or method int8 or fp8"


def _advice_for_experts(quantization: Quantization, problems_of: Callable[[Quantization], list[Problem]]) -> str:
    """Return the config change that makes a mixture of experts servable: method fp8, or unquantized experts."""
    fp8 = replace(quantization, method="fp8", weights="fp8")
    if not problems_of(fp8):
        return "choose method fp8"
    ignoring = f"add '{EXPERTS}' to ignore"
    return ignoring if quantization.weights == "fp8" else f"choose method fp8 and {ignoring}"


def _explain(problems: list[Problem], advice: str, quantization: Quantization, device: Device) -> str:
    layers_by_reason: dict[str, list[str]] = defaultdict(list)
    for problem in problems:
        layers_by_reason[problem.reason].append(problem.layer)
    lines = [
        f"  {layers[0]}{f' and {len(layers) - 1} more' if layers[1:] else ''}: {reason}"
        for reason, layers in layers_by_reason.items()
    ]
    groups = f" with group_size {quantization.group_size}" if quantization.weights == "int4" else ""
    return "\n".join(
        [
            f"{quantization.method}{groups} would give a model that vLLM cannot serve on {device} "
            f"at tensor_parallel_size {quantization.tensor_parallel_size}:",
            *lines,
            f"To fix it, {advice}.",
        ]
    )
