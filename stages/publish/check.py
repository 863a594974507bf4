"""What is wrong with the place that a model will be published to, found when the refresh begins."""

from __future__ import annotations

from collections.abc import Iterator

from stages.core.contract import StageInput
from stages.core.errors import LifecycleError, TransientError
from stages.publish.config import PublishConfig
from stages.publish.targets.registry import parse_address, target_of


def check(stage_input: StageInput) -> Iterator[tuple[str, LifecycleError | str]]:
    """Dotted field and error; of a target that does not answer now, that it was not asked."""
    config = PublishConfig.model_validate(stage_input.config)
    if config.dry_run:
        return
    try:
        target_of(parse_address(config.to), private=config.private).check()
    except TransientError as error:
        yield "to", str(error)
    except LifecycleError as error:
        yield "to", error
