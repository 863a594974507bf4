"""Input models of a training stage, and quick checks of engine, layout and document lengths against their configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stages.core.contract import StageContext
from stages.core.errors import LayoutError, ModelError, ResourceError
from stages.kinds.train.added_tokens import with_added_tokens
from stages.kinds.train.blocks import MoeConfig
from stages.kinds.train.config import TrainConfig
from stages.models.facts import LEARNED_POSITIONS, ModelFacts
from stages.models.model_folder import check_unquantized, code_not_run
from stages.models.picture_bounds import with_picture_bounds
from stages.models.shape import ModelShape
from stages.parallel.engines.registry import RULES


@dataclass(frozen=True)
class InputModels:
    """Input models of a training stage: the one that learns, and the teacher for distillation.

    start: the model that learns, or the base of the adapter that does. teacher: None for one on a server, too.
    """

    start: ModelFacts
    teacher: ModelFacts | None = None

    @classmethod
    def of(cls, config: TrainConfig, inputs: Mapping[str, Path]) -> InputModels:
        """Return the models that a training config names. inputs: folder of each stage's artifact, by stage name."""
        start, teacher = inputs[config.base or config.model], config.teacher and inputs[config.teacher]
        return cls(ModelFacts(start / "model"), ModelFacts(teacher / "model") if teacher else None)

    def as_started(self, config: TrainConfig, room: Path, *, weights: bool = True) -> InputModels:
        """Return the models with the tokens that the recipe adds, and its bounds of pictures, in folders of `room`.

        Raises as `with_added_tokens` and `with_picture_bounds` do.
        """
        trusted = config.trust_remote_code
        start = with_added_tokens(self.start, config.data.add_tokens, room, trust_remote_code=trusted, weights=weights)
        return replace(self, start=with_picture_bounds(start, config.media, room, trust_remote_code=trusted))


def check_lengths(longest: int, context: StageContext, facts: ModelFacts) -> None:
    """Warn if the longest document (tokens) exceeds the model's positions; ModelError if those are a learned table."""
    limit = facts.max_positions
    if limit is None or longest <= limit:
        return
    excess = f"the longest document has {longest} tokens, and the model's config says {limit} positions"
    if facts.config.get("model_type") in LEARNED_POSITIONS:
        raise ModelError(
            f"{excess}, which are a table; lower data.sequence_length, with `over_long: truncate` or `drop`"
        )
    context.warn(f"{excess}: it was not trained on longer texts")


def check_model(config: TrainConfig, context: StageContext, facts: ModelFacts) -> ModelShape | None:
    """Check that engine and layout can train the model, and return its shape; None if its sizes are unknown.

    Raises LayoutError or ModelError for what is not allowed or supported; unwise layouts only warn.
    """
    check_unquantized(facts, str(facts.folder))
    if note := code_not_run(facts, trusted=config.trust_remote_code):
        context.warn(note)
    rules = RULES[config.engine]
    try:
        shape = rules.shape_of(facts)
    except ModelError as error:
        if rules.builds_from_shape:
            raise
        context.warn(f"the planner cannot predict memory and step time of this model: {error}")
        return None
    # An engine that runs the model's own code looks for routers in the model itself.
    if rules.builds_from_shape and config.moe != MoeConfig() and not shape.num_experts:
        raise ModelError(f"`moe` is for mixtures of experts, and {shape.family} has none; remove it")
    if errors := "; ".join(config.refusals(shape)):
        raise LayoutError(errors)
    for warning in rules.layout_warnings(config.layout, config.constraints, shape):
        context.warn(warning)
    return shape


def check_layout_on_device(config: TrainConfig, torch_type: str, shape: ModelShape) -> None:
    """Raise ResourceError if the engine cannot run the layout on this machine's kind of device."""
    errors = RULES[config.engine].device_errors(torch_type, config.layout, config.precision, shape)
    if problems := "; ".join(errors):
        raise ResourceError(problems)
