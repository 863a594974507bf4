"""A second quantizer: every weight of a layer rounded to one of 255 values of its row, kept as bfloat16."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from stages.core.errors import ModelError
from stages.models.linear_layers import read_projections
from stages.serving.engine import Quantization


def quantize(
    source: Path,
    target: Path,
    quantization: Quantization,
    samples: list[list[int]],
    *,
    seed: int,
    trust_remote_code: bool,
    report: Callable[[int, int], None],
) -> list[ModelError]:
    layers = {f"{layer.name}.weight" for layer in quantization.layers(read_projections(source))}
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    for number, name in enumerate(sorted(layers)):
        report(number, len(layers))
        scale = weights[name].abs().amax(dim=1, keepdim=True) / 127
        weights[name] = (weights[name] / scale).round() * scale
    halved = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    save_file(halved, target / "model.safetensors", metadata={"format": "pt"})
    return []
