"""In which dtype an engine computes that would make float16 of weights in float32."""

from __future__ import annotations

from stages.models.model_config import read_config
from stages.serving.launch import LaunchSpec


def dtype_of(spec: LaunchSpec) -> str:
    """What the recipe says; of `auto`, bfloat16 for weights in float32."""
    stored = read_config(spec.model)
    if spec.serving.dtype == "auto" and "float32" in (stored.get("dtype"), stored.get("torch_dtype")):
        return "bfloat16"
    return spec.serving.dtype
