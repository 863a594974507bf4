"""The check of all stages' inputs, which runs before training, saves each problem as soon as it is found."""

import json

import pytest

from stages.core.contract import StageContext, StageInput
from stages.kinds.check.config import FINDINGS_FILE, CheckConfig
from stages.kinds.check.run import run
from stages.kinds.quantize import check as check_of_quantize

TRAINING = {
    "kind": "train",
    "method": "sft",
    "model": "base",
    "data": {"dataset": "rows"},
    "global_batch_size": 4,
    "learning_rate": 1e-3,
    "steps": 1,
}


class KilledError(BaseException):
    """Error that ends the check of stage inputs abruptly, like SIGKILL."""


def test_what_was_found_stays_found_when_the_next_input_takes_too_long(tmp_path, monkeypatch):
    def takes_too_long(_):
        raise KilledError

    monkeypatch.setattr(check_of_quantize, "check", takes_too_long)
    inputs = {"base": tmp_path / "base", "rows": tmp_path / "rows"}
    (tmp_path / "rows" / "data").mkdir(parents=True)
    stages = [
        StageInput(name=name, kind=kind, version="0" * 12, config=config, inputs=inputs, cache=tmp_path / "cache")
        for name, kind, config in (("sft", "train", TRAINING), ("awq", "quantize", {}))
    ]
    (tmp_path / "work").mkdir()
    with pytest.raises(KilledError):
        run(CheckConfig(stages=tuple(stages)), StageContext(tmp_path / "work", "", "", {}, {}, tmp_path / "cache"))
    [problem] = json.loads((tmp_path / "work" / FINDINGS_FILE).read_text())["problems"]
    assert (problem["stage"], problem["field"], problem["error"]) == ("sft", "data.split", "DataError")
