"""Freezing of parts of a model that sees or hears: its towers, projector or language model."""

from typing import Any

from stages.core.errors import ModelError
from stages.engines.settings import MediaSettings
from stages.models.parts import parts_of, passed_by


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


def freeze_parts(causal_lm: Any, media: MediaSettings) -> None:
    """Freeze the named parts of a model, and what media of the rows' kinds do not pass through.

    Raises ModelError for a part that the model lacks, and if nothing is left.
    """
    parts, frozen = parts_of(causal_lm), sorted(media.freeze)
    if lacked := [part for part in frozen if not parts[part]]:
        raise ModelError(f"`freeze` names {lacked[0]}, which {type(causal_lm).__name__} does not have; remove it")
    still = passed_by(causal_lm, media.kinds)
    of_parts = [named for part, named in parts.items() if part not in frozen]
    learning = {id(one) for named in of_parts for name, one in named.items() if name not in still}
    if not learning:
        raise ModelError(f"`freeze` names {', '.join(frozen)}, so that nothing would learn; leave one out")
    for parameter in causal_lm.parameters():
        if id(parameter) not in learning:
            parameter.requires_grad_(False)
