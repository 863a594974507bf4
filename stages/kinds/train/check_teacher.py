"""Whether a model, or a server, can be the teacher of another model: the same tokens must mean the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.core.errors import LifecycleError, ModelError, RecipeError
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.execution import TrainExecution
from stages.kinds.train.methods.method import TeacherTokens
from stages.kinds.train.teacher_server import ServedTeacher
from stages.models.model_config import read_config
from stages.models.model_folder import vocabulary_size

NUM_NAMED = 3


def check_teacher(config: TrainConfig, inputs: Mapping[str, Path], model_folder: Path) -> Iterator[LifecycleError]:
    """What is wrong with the teacher, if the method has one."""
    asked, trusted = config.teacher_tokens, config.trust_remote_code
    if asked and asked.server:
        yield from server_problems(asked, config.execution, model_folder, trust_remote_code=trusted)
    elif asked and config.teacher:
        teacher = inputs[config.teacher] / "model"
        yield from teacher_problems(asked, teacher, model_folder, trust_remote_code=trusted)


def server_problems(
    asked: TeacherTokens, execution: TrainExecution, model: Path, *, trust_remote_code: bool
) -> Iterator[LifecycleError]:
    """What is wrong with a served teacher, which is asked about a few tokens."""
    try:
        if too_many := _too_many(asked, vocabulary_size(read_config(model))):
            yield too_many
        else:
            ServedTeacher.of(asked, execution).check(model, trust_remote_code=trust_remote_code)
    except LifecycleError as error:
        yield error


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
    elif too_many := _too_many(asked, sizes[0]):
        yield too_many


def _too_many(asked: TeacherTokens, vocabulary: int | None) -> RecipeError | None:
    if vocabulary is None or asked.number <= vocabulary:
        return None
    return RecipeError(
        f"{asked.number} likeliest tokens of the teacher are asked for, of a vocabulary of {vocabulary}; lower "
        "`loss_top_k`"
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
