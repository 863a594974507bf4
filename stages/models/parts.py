"""Parts of a model that sees or hears: its towers, projector and language model; every parameter is in exactly one."""

from collections.abc import Collection
from typing import Any

from torch import nn

from stages.models.layers import parts_for_text
from stages.models.media import TOWER_OF, TOWERS, MediaKind, ModelPart

MERGER = "merger"
"""Word in the names of a tower's modules that bring pictures into the width of the text (Qwen, GLM)."""
SOUND = "audio"
"""Word in the names of modules for sound, in models that see, too."""


def towers_of(causal_lm: Any) -> dict[ModelPart, nn.Module]:
    """Return the modules that turn media into vectors, each with its merger if it has one."""
    found = {part: causal_lm.get_encoder(modality=kind) for part, kind in TOWERS.items()}
    # Transformers gives the model itself for a kind that it has no tower of.
    return {part: tower for part, tower in found.items() if tower is not None and tower is not causal_lm}


def parts_of(causal_lm: Any) -> dict[ModelPart, dict[str, nn.Parameter]]:
    """Return the parameters of each part of a model by their names."""
    of_text = {id(one) for part in parts_for_text(causal_lm) for one in part.parameters()}
    of_towers = {
        id(one): part
        for part, tower in towers_of(causal_lm).items()
        for name, one in tower.named_parameters()
        if MERGER not in name
    }
    parts: dict[ModelPart, dict[str, nn.Parameter]] = {
        part: {} for part in ("vision_tower", "projector", "language_model", "audio_tower")
    }
    for name, parameter in causal_lm.named_parameters():
        part = "language_model" if id(parameter) in of_text else of_towers.get(id(parameter), "projector")
        parts[part][name] = parameter
    return parts


def passed_by(causal_lm: Any, kinds: Collection[MediaKind]) -> set[str]:
    """Return the names of the parameters of towers and projector through which media of these kinds do not pass."""
    parts = parts_of(causal_lm)
    has_both = len(towers_of(causal_lm)) == len(TOWERS)
    towers = {TOWER_OF[kind] for kind in kinds}
    hears, sees = "audio_tower" in towers, "vision_tower" in towers
    unheard = {} if hears else parts["audio_tower"]
    unseen = {} if sees else parts["vision_tower"]
    between = (name for name in parts["projector"] if has_both and not (hears if SOUND in name else sees))
    return {*unheard, *unseen, *between}
