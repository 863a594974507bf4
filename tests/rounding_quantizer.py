"""Quantization method that only tests register: it rounds each weight to one of 255 values of its row, in bfloat16."""

import shutil

import torch
from safetensors.torch import load_file, save_file

from stages.core.errors import ModelError
from stages.kinds.quantize.registry import QuantizationJob
from stages.models.linear_layers import read_projections


def quantize(job: QuantizationJob) -> list[ModelError]:
    layers = {f"{layer.name}.weight" for layer in job.quantization.layers(read_projections(job.source))}
    shutil.copytree(job.source, job.target)
    weights = load_file(job.target / "model.safetensors")
    for number, name in enumerate(sorted(layers)):
        job.report(number, len(layers))
        scale = weights[name].abs().amax(dim=1, keepdim=True) / 127
        weights[name] = (weights[name] / scale).round() * scale
    halved = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    save_file(halved, job.target / "model.safetensors", metadata={"format": "pt"})
    return []
