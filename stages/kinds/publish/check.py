"""Early check of publish stages: whether the target can be written to, before the refresh trains anything."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from stages.core.contract import StageInput
from stages.core.errors import LifecycleError, TransientError
from stages.kinds.publish.config import PublishConfig
from stages.kinds.publish.targets.folder import check_outside
from stages.kinds.publish.targets.registry import parse_address, target_of


def check_stores(config: PublishConfig, inputs: Mapping[str, Path]) -> None:
    """Raise PublishError if a target folder is in the artifact store. inputs: folders, `STORE/KIND/ARTIFACT`."""
    address = parse_address(config.to)
    if address.scheme == "file":
        for store in {folder.parent.parent for folder in inputs.values()}:
            check_outside(Path(address.place), store)


def check(stage_input: StageInput) -> Iterator[tuple[str, LifecycleError | str]]:
    """Yield reasons why the target would refuse files, by config field; a text says why it could not be checked."""
    config = PublishConfig.model_validate(stage_input.config)
    if config.dry_run:
        return
    try:
        check_stores(config, stage_input.inputs)
        target_of(parse_address(config.to), private=config.private).check()
    except TransientError as error:
        yield "to", str(error)
    except LifecycleError as error:
        yield "to", error
