"""Whether a model can be the teacher of another one, by their files alone: the same tokens must mean the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.core.contract import StageContext
from stages.core.errors import LifecycleError, ModelError, RecipeError
from stages.models.config_check import vocabulary_size
from stages.models.model_config import read_config
from stages.train.config import TrainConfig
from stages.train.methods.method import TeacherTokens

NUM_NAMED = 3


def check_teacher(config: TrainConfig, context: StageContext, model_folder: Path) -> None:
    """Raise what is wrong with the teacher, if the method has one."""
    if config.teacher and config.teacher_tokens:
        teacher, trusted = context.inputs[config.teacher] / "model", config.trust_remote_code
        for problem in teacher_problems(config.teacher_tokens, teacher, model_folder, trust_remote_code=trusted):
            raise problem


def teacher_problems(
    asked: TeacherTokens, teacher: Path, model: Path, *, trust_remote_code: bool
) -> Iterator[LifecycleError]:
    """What is wrong with a teacher, of two model folders: another tokenizer or vocabulary, fewer tokens than wanted."""
    try:
        tokens = [_vocabulary(folder, trust_remote_code) for folder in (teacher, model)]
        sizes = [vocabulary_size(read_config(folder)) for folder in (teacher, model)]
    except ModelError as error:
        yield error
        return
    if different := _different_tokens(*tokens):
        named = ", ".join(different[:NUM_NAMED])
        yield ModelError(
            f"the teacher in {teacher} has another tokenizer than the model in {model}: {len(different)} tokens are "
            f"not the same ({named}); take a teacher of the same family, or learn from what it writes (`kind: "
            "generate`, and `method: sft`)"
        )
    elif sizes[0] != sizes[1]:
        yield ModelError(
            f"the teacher in {teacher} has a vocabulary of {sizes[0]} entries, the model in {model} of {sizes[1]}; "
            "take a teacher whose embedding has as many"
        )
    elif sizes[0] is not None and asked.number > sizes[0]:
        yield RecipeError(
            f"{asked.number} likeliest tokens of the teacher are asked for, of a vocabulary of {sizes[0]}; lower that"
        )


def _vocabulary(folder: Path, trust_remote_code: bool) -> dict[str, int]:
    from transformers import AutoTokenizer  # takes a second

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        return AutoTokenizer.from_pretrained(folder, **options).get_vocab()
    except Exception as error:  # tokenizers raises nothing more special
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {error}") from error


def _different_tokens(one: dict[str, int], other: dict[str, int]) -> list[str]:
    different = [token for token in {**one, **other} if one.get(token) != other.get(token)]
    return [f"{token!r} is {one.get(token)} and {other.get(token)}" for token in sorted(different)]
