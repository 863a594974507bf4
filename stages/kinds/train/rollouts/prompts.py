"""The prompts of a training stage, read and checked before anything is sampled."""

from __future__ import annotations

from pathlib import Path

from stages.core.errors import DataError
from stages.data.config import DEFAULT_DATE
from stages.data.tokenizer import DocumentTokenizer
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.rollouts import RolloutOptions, SamplingOptions
from stages.kinds.train.rollouts.documents import Packing
from stages.models.model_config import max_positions, read_config
from stages.rollouts.options import PromptOptions
from stages.rollouts.prompts import AskedPrompt, read_prompts

NUM_NAMED = 5


def checked_prompts(
    config: TrainConfig, options: RolloutOptions, folder: Path, model_folder: Path
) -> list[AskedPrompt]:
    """folder: the dataset's. Raises DataError, also for prompts that leave too little room for their completions."""
    data = config.data
    asked = PromptOptions(
        split=data.split,
        limit=None,
        reference=options.reference,
        reference_field=f"{config.method}.reference",
        system=options.system,
        apply_chat_template=options.apply_chat_template,
        rewards=options.rewards,
        chat_template=data.chat_template,
        columns=data.columns,
        template_date=None if data.template_date == DEFAULT_DATE else data.template_date,
    )
    prompts = read_prompts(folder, asked, model_folder)
    most = most_tokens(config, options, model_folder)
    room = most - options.max_completion_length
    if too_long := [one for one in prompts if len(one.token_ids) > room]:
        named = ", ".join(f"{one.place} ({len(one.token_ids)} tokens)" for one in too_long[:NUM_NAMED])
        raise DataError(
            f"{len(too_long)} of {len(prompts)} prompts do not leave {options.max_completion_length} tokens "
            f"(max_completion_length) of the {most} that the model, sequence_length and serving.max_model_len allow "
            f"together: {named}; raise one of these, lower max_completion_length, or leave these rows out"
        )
    return prompts


def completion_packing(
    config: TrainConfig, options: SamplingOptions, model_folder: Path, temperature: float
) -> Packing:
    """How completions lie in batches. temperature: of the probabilities that learn."""
    return Packing(
        config.data.sequence_length,
        most_tokens(config, options, model_folder),
        bool(config.data.packing),
        config.layout.micro_batch_size,
        DocumentTokenizer(model_folder, None, "assistant").padding_token,
        temperature,
    )


def most_tokens(config: TrainConfig, options: SamplingOptions, model_folder: Path) -> int:
    """Of a prompt and its completion together."""
    limits = (config.data.sequence_length, options.serving.max_model_len, max_positions(read_config(model_folder)))
    return min(limit for limit in limits if limit)
