"""A training reads the config of each model that it uses once."""

import shutil
import sys
from collections import Counter

from stages.kinds.train.run import run
from tests.train_stage import make_artifacts, make_config, make_context

DIGEST = "file_digest"
"""Function that hashes files, for the keys of caches: it asks for no fact."""


def test_each_config_is_read_once_in_a_training(tmp_path):
    """By our own code: Transformers reads it too, whenever it makes a tokenizer or a model."""
    artifacts = make_artifacts(tmp_path)
    shutil.copytree(artifacts["base"], tmp_path / "teacher")
    inputs = {**artifacts, "teacher": tmp_path / "teacher"}
    data = {"dataset": "problems", "evaluation_split": "validation", "sequence_length": 64}
    config = make_config("distill", teacher="teacher", data=data, steps=1, distill={"loss_top_k": 4})
    opened, is_counted = Counter(), True

    def count(event, arguments):
        if not is_counted or event != "open" or not str(arguments[0]).endswith("/model/config.json"):
            return
        frame = sys._getframe(1)
        while frame and frame.f_globals.get("__name__") in ("pathlib", "io"):
            frame = frame.f_back
        if frame and frame.f_globals["__name__"].startswith("stages.") and frame.f_code.co_name != DIGEST:
            opened[str(arguments[0])] += 1

    sys.addaudithook(count)
    try:
        run(config, make_context(tmp_path / "work", inputs, config))
    finally:
        is_counted = False
    assert opened == {str(inputs[name] / "model" / "config.json"): 1 for name in ("base", "teacher")}
