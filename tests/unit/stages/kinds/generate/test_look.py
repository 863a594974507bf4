"""The preview of a generate stage's prompts shows what the model is asked, and the right answers."""

import json

import pytest

from stages.core.contract import StageInput
from stages.core.errors import DataError, ModelError
from stages.kinds.generate.look import look
from tests.serving import make_model

ROWS = [{"prompt": [{"role": "user", "content": f"{n} + 1?"}], "answer": n + 1} for n in range(9)]
CONFIG = {"kind": "generate", "model": "base", "prompts": {"dataset": "rows", "limit": 5}, "system": "Add."}


@pytest.fixture
def stage_input(tmp_path):
    def make(rows, config=CONFIG):
        (tmp_path / "rows" / "data").mkdir(parents=True)
        (tmp_path / "rows" / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        inputs = {"base": tmp_path / "base", "rows": tmp_path / "rows"}
        return StageInput(name="a", kind="generate", version="", config=config, inputs=inputs, cache=tmp_path / "cache")

    return make


def test_prompts_are_shown_with_their_right_answers(stage_input, tmp_path):
    make_model(tmp_path / "base" / "model")
    found = look(stage_input(ROWS), 2, tmp_path)
    assert found.what == "prompts"
    assert [row.name for row in found.rows] == ["train.jsonl:1", "train.jsonl:2"]
    prompt, answer = found.rows[1].documents
    asked = "".join(piece.text for piece in prompt.pieces)
    assert "Add." in asked
    assert "1 + 1?" in asked
    assert (prompt.name, prompt.num_target_tokens, answer.name, answer.pieces[0].text) == (
        "prompt",
        0,
        "right answer",
        "2",
    )
    (portion,) = found.portions
    assert (portion.num_source_rows, sum(bar.count for bar in portion.lengths)) == (5, 5)


def test_what_is_no_prompt_and_a_model_without_tokenizer_are_refused(stage_input, tmp_path):
    given = stage_input([*ROWS[:2], {"prompt": ""}])
    with pytest.raises(ModelError, match="of base has no tokenizer"):
        look(given, 2, tmp_path)
    make_model(tmp_path / "base" / "model")
    with pytest.raises(DataError, match="1 of 3 rows are no prompts"):
        look(given, 2, tmp_path)
