"""Preview of the prompts that a generate stage will send to its model."""

from pathlib import Path

from stages.adapters.headers import ADAPTER_FOLDER
from stages.core.contract import StageInput
from stages.core.errors import ModelError
from stages.data.summaries import DataLook
from stages.kinds.generate.config import GenerateConfig
from stages.rollouts.look import look_at_prompts
from stages.rollouts.prompts import prompt_media, read_prompts


def look(stage_input: StageInput, num_rows: int, _scratch: Path) -> DataLook:
    """Return a preview of a generate stage's prompts: the first ones with their right answers, and counts of all."""
    config = GenerateConfig.model_validate(stage_input.config)
    artifact = stage_input.inputs[config.model]
    folder = next((path for path in (artifact / ADAPTER_FOLDER, artifact / "model") if path.is_dir()), None)
    if folder is None:
        raise ModelError(f"the artifact of {config.model} has no tokenizer, so its prompts cannot be shown")
    base = stage_input.inputs[config.base] / "model" if config.base else None
    data = config.prompt_folder(stage_input.inputs)
    media = prompt_media(data, config.prompts.split, base or folder)
    prompts = read_prompts(data, config.prompt_options, folder, media, base)
    return look_at_prompts(prompts, folder, num_rows, base)
