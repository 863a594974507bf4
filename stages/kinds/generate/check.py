"""Early check of generate stages: finds mistakes in prompts and rewards before the model is trained."""

from collections.abc import Iterator

from stages.adapters.headers import ADAPTER_FOLDER
from stages.core.contract import StageInput
from stages.core.errors import DataError, LifecycleError
from stages.kinds.generate.config import GenerateConfig, Solved
from stages.rewards.judging import opening_problems
from stages.rewards.reward import RewardContext
from stages.rollouts.acting import turn_reader
from stages.rollouts.prompts import prompt_media, read_prompts


def check(stage_input: StageInput) -> Iterator[tuple[str, LifecycleError]]:
    """Yield errors in a generate stage's prompts and rewards, with the dotted config field of each."""
    config = GenerateConfig.model_validate(stage_input.config)
    context = RewardContext(stage_input.inputs, stage_input.cache, lambda _: None)
    yield from ((f"rewards.{name}", error) for name, error in opening_problems(config.rewards, context))
    if config.environment and (broken := list(config.environment.opening_problems())):
        yield from (("environment", error) for error in broken)
        return  # its tools are part of the prompts
    artifact = stage_input.inputs[config.model]
    folder = next((path for path in (artifact / ADAPTER_FOLDER, artifact / "model") if path.is_dir()), None)
    base = stage_input.inputs[config.base] / "model" if config.base else None
    try:
        if folder:  # a serve stage's artifact has none; its prompts are read when its turn comes
            data = config.prompt_folder(stage_input.inputs)
            media = prompt_media(data, config.prompts.split, base or folder)
            prompts = read_prompts(data, config.prompt_options, folder, media, base)
            if config.environment:  # refuses a chat template that it does not suit
                turn_reader(folder, base or folder, config.environment, prompts)
            if isinstance(config.keep, Solved) and any(one.pictures for one in prompts):
                reason = "keeps rows of text alone, and these have pictures; name another `keep`"
                yield "keep", DataError(f"`keep: {{solved: …}}` {reason}")
    except LifecycleError as error:
        yield "prompts", error
