"""A training reads the `config.json` of each model that it uses only once."""

import shutil
import sys
from collections import Counter
from dataclasses import replace

import pytest

from stages.core.contract import Trial
from stages.kinds.train import run as training
from tests.train_stage import make_artifacts, make_config, make_context

DIGEST = "file_digest"
"""Name of our function that hashes files; when it opens a `config.json`, the test does not count that."""
DATA = {"dataset": "problems", "evaluation_split": "validation", "sequence_length": 64}
SAMPLING = {"num_generations": 2, "max_completion_length": 8, "rewards": {"like": {"type": "regex", "pattern": "e"}}}


@pytest.fixture
def inputs(tmp_path):
    artifacts = make_artifacts(tmp_path)
    shutil.copytree(artifacts["base"], tmp_path / "teacher")
    return {**artifacts, "teacher": tmp_path / "teacher"}


@pytest.fixture
def opened():
    """Provide a counter of our own openings of each model's `config.json`; Transformers' do not count."""
    counts, is_counted = Counter(), True

    def count(event, arguments):
        if not is_counted or event != "open" or not str(arguments[0]).endswith("/model/config.json"):
            return
        frame = sys._getframe(1)
        while frame and frame.f_globals.get("__name__") in ("pathlib", "io"):
            frame = frame.f_back
        if frame and frame.f_globals["__name__"].startswith("stages.") and frame.f_code.co_name != DIGEST:
            counts[str(arguments[0])] += 1

    sys.addaudithook(count)
    yield counts
    is_counted = False


def once(inputs, *names):
    """Return the expected number of reads of each named model's `config.json`, which is 1, by path."""
    return {str(inputs[name] / "model" / "config.json"): 1 for name in names}


def test_each_config_is_read_once_in_a_training(tmp_path, inputs, opened):
    config = make_config("distill", teacher="teacher", data=DATA, steps=1, distill={"loss_top_k": 4})
    training.run(config, make_context(tmp_path / "work", inputs, config))
    assert opened == once(inputs, "base", "teacher")


@pytest.mark.parametrize(
    ("method", "fields", "models"),
    [
        ("grpo", {"grpo": {**SAMPLING, "beta": 0.1}}, ["base"]),
        (
            "distill",
            {
                "teacher": "teacher",
                "distill": {"loss_top_k": 4, "lmbda": 0.5, "sampling": {"max_completion_length": 8}},
            },
            ["base", "teacher"],
        ),
    ],
)
def test_each_config_is_read_once_before_a_model_samples(tmp_path, inputs, opened, monkeypatch, method, fields, models):
    """Methods that sample also read each model's config once before the first step, which would need an engine."""
    monkeypatch.setattr(training, "train", lambda training_run: None)
    config = make_config(method, data=DATA if method == "distill" else {**DATA, "evaluation_split": None}, **fields)
    context = make_context(tmp_path / "work", inputs, config)
    training.run(config, replace(context, trial=Trial(steps=1)))
    assert opened == once(inputs, *models)
