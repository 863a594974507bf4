"""Unsuitable distillation teachers are refused before training; a teacher's top tokens reach their target tokens."""

import json
import shutil

import numpy as np
import pytest
import torch

from stages.core.contract import StageInput
from stages.core.errors import ModelError, RecipeError
from stages.data.batch import Batch, Documents
from stages.kinds.train.check import check
from stages.kinds.train.check_model import InputModels
from stages.kinds.train.methods.method import TeacherTokens
from stages.kinds.train.teacher import TeacherRows, check_teacher
from tests.train_stage import make_artifacts, make_config

DATA = {"dataset": "problems", "sequence_length": 64}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    return make_artifacts(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture
def teacher(artifacts, tmp_path):
    """Provide an artifact with a copy of the model, to be used as teacher in distillation."""
    shutil.copytree(artifacts["base"] / "model", tmp_path / "teacher" / "model")
    return tmp_path / "teacher"


def config_of(**distill):
    return make_config("distill", data=DATA, teacher="teacher", distill=distill)


def found(artifacts, teacher, tmp_path, **distill):
    """Return the errors found before training with a teacher; the train stage must find the same."""
    config, inputs = config_of(**distill), {**artifacts, "teacher": teacher}
    stage_input = StageInput(
        name="small", kind="train", version="0", config=config.model_dump(mode="json"), inputs=inputs, cache=tmp_path
    )
    errors = [error for field, error in check(stage_input) if field == "teacher"]
    again = check_teacher(config, InputModels.of(config, inputs))
    assert list(map(str, again)) == list(map(str, errors)), "the stage itself says the same"
    return errors


def test_the_same_tokenizer_is_no_problem(artifacts, teacher, tmp_path):
    assert found(artifacts, teacher, tmp_path) == []


def test_another_tokenizer_is_named_with_tokens_that_differ(artifacts, teacher, tmp_path):
    path = teacher / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    (error,) = found(artifacts, teacher, tmp_path)
    assert isinstance(error, ModelError)
    assert "has another tokenizer than the model in" in str(error)
    assert f"2 tokens are not the same ('a' is {vocabulary['a']} and {vocabulary['b']}" in str(error)


def test_another_size_of_the_vocabulary_is_named(artifacts, teacher, tmp_path):
    path = teacher / "model" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 64}))
    (error,) = found(artifacts, teacher, tmp_path)
    assert f"of {config['vocab_size'] + 64} entries, the model in" in str(error)


def test_more_tokens_than_there_are_is_named(artifacts, teacher, tmp_path):
    (error,) = found(artifacts, teacher, tmp_path, loss_top_k=100_000)
    assert isinstance(error, RecipeError)
    assert "`loss_top_k` asks for 100000 tokens of the teacher, whose vocabulary has" in str(error)


def test_a_teacher_without_a_tokenizer_is_said(artifacts, teacher, tmp_path):
    (teacher / "model" / "tokenizer.json").write_text("{")
    (error,) = found(artifacts, teacher, tmp_path)
    assert "cannot be loaded" in str(error)


def test_what_is_said_goes_to_its_targets_in_whatever_order_rows_come():
    record = np.dtype([("tokens", np.int32, (2,)), ("log_probabilities", np.float32, (2,))])
    said = np.array([((number, 90), (-number, -9)) for number in range(6)], dtype=record)
    rows = TeacherRows(np.array([3, 5, 8]), np.array([0, 2, 3, 6]), said, TeacherTokens(2, 0.5), False)
    targets = torch.tensor([[7, -100, 7, 7], [-100, 7, 7, -100], [-100, -100, -100, -100]])
    zeros = torch.zeros_like(targets)
    batch = rows.attach(Batch.of(zeros, targets, zeros, Documents(zeros, 3, [12])), [8, 3])
    assert batch.signal.temperature == 0.5
    assert batch.signal.candidates.tokens[..., 0].tolist() == [[3, 0, 4, 5], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert batch.signal.candidates.log_probabilities[..., 0].tolist() == [[-3, 0, -4, -5], [0, 0, -1, 0], [0, 0, 0, 0]]
