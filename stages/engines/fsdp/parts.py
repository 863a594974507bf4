"""Freezing of parts of a model that sees: vision tower, projector or language model."""

from collections.abc import Collection
from typing import Any

from stages.core.errors import ModelError
from stages.engines.settings import MediaSettings
from stages.models.parts import parts_of
from stages.models.tower import ModelPart


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
