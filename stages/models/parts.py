"""Parts of a model that sees: vision tower, projector and language model; every parameter is in exactly one."""

from typing import Any

from torch import nn

from stages.models.layers import parts_for_text
from stages.models.tower import ModelPart

MERGER = "merger"
"""Word in the names of a tower's modules that bring pictures into the width of the text (Qwen, GLM)."""
SOUND = "audio"
"""Word in the names of modules for sound, which pictures and text do not pass through."""


def tower_of(causal_lm: Any) -> nn.Module:
    """Return the module that turns pictures into vectors, with its merger if it has one."""
    tower: nn.Module = causal_lm.get_encoder(modality="image")
    return tower


def parts_of(causal_lm: Any) -> dict[ModelPart, dict[str, nn.Parameter]]:
    """Return the parameters of each part of a model by their names; what is for sound is in none."""
    of_text = {id(one) for part in parts_for_text(causal_lm) for one in part.parameters()}
    of_tower = {id(one) for name, one in tower_of(causal_lm).named_parameters() if MERGER not in name}
    parts: dict[ModelPart, dict[str, nn.Parameter]] = {"vision_tower": {}, "projector": {}, "language_model": {}}
    for name, parameter in causal_lm.named_parameters():
        if id(parameter) in of_text:
            parts["language_model"][name] = parameter
        elif id(parameter) in of_tower:
            parts["vision_tower"][name] = parameter
        elif SOUND not in name:
            parts["projector"][name] = parameter
    return parts
