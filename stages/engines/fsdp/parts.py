"""Parts of a model that sees: vision tower, projector and language model; every parameter is in exactly one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from stages.core.errors import ModelError
from stages.engines.settings import MediaSettings, ModelPart
from stages.models.layers import parts_for_text

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


def learning_rate_ratios(causal_lm: Any, media: MediaSettings | None) -> dict[str, float]:
    """Return the factor on the learning rate of each weight, by name, where its part has one; computed before sharding.

    Raises ModelError for a part of which nothing learns.
    """
    ratios: dict[str, float] = {}
    for part, ratio in media.learning_rate_ratios.items() if media else ():
        learning = {name for name, one in parts_of(causal_lm)[part].items() if one.requires_grad}
        if not learning:
            raise ModelError(
                f"`part_learning_rates` names {part}, of which nothing learns in {type(causal_lm).__name__}; remove it"
            )
        ratios |= dict.fromkeys(learning, ratio)
    return ratios


def freeze_parts(causal_lm: Any, frozen: Collection[ModelPart]) -> None:
    """Freeze the named parts of a model that sees, and what is for sound; raise ModelError if nothing is left."""
    parts = parts_of(causal_lm)
    learning = {id(one) for part, named in parts.items() if part not in frozen for one in named.values()}
    if not learning:
        raise ModelError(f"`freeze` names {', '.join(sorted(frozen))}, so that nothing would learn; leave one out")
    for parameter in causal_lm.parameters():
        if id(parameter) not in learning:
            parameter.requires_grad_(False)
