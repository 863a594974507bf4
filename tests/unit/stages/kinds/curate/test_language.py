"""The language filter drops rows in other languages, and keeps rows with too few letters to tell."""

import pytest
from py3langid.langid import MODEL_FILE, LanguageIdentifier
from pydantic import ValidationError

from stages.kinds.curate.config import LANGUAGES, CurateConfig
from tests.unit.stages.kinds.curate.curating import curate

ENGLISH = "The harbour was quiet in the morning, and the boats had not yet left for the open sea."
GERMAN = "Der Hafen war am Morgen still, und die Boote waren noch nicht aufs offene Meer gefahren."
CHINESE = "早晨的港口很安静，船只还没有驶向大海。"
TOO_SHORT = "46"


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_the_listed_codes_are_those_of_the_library():
    assert set(LanguageIdentifier.from_model_file(MODEL_FILE).labels) == LANGUAGES


@pytest.mark.parametrize(("keep", "kept"), [(["en"], [ENGLISH]), (["de", "zh"], [GERMAN, CHINESE])])
def test_rows_in_other_languages_are_left_out_with_the_one_they_are_in(tmp_path, keep, kept):
    rows = [{"text": text} for text in (ENGLISH, GERMAN, TOO_SHORT, CHINESE)]
    found = curate(tmp_path, rows, language={"keep": keep})
    assert [row["text"] for row in found.rows] == [
        text for text in (ENGLISH, GERMAN, TOO_SHORT, CHINESE) if text in (*kept, TOO_SHORT)
    ]
    assert {row["step"] for row in found.dropped} == {"language"}
    assert all(row["reason"].startswith("is ") for row in found.dropped)


def test_all_messages_of_a_row_are_read(tmp_path):
    rows = [chat(GERMAN, GERMAN), chat("Und?", ENGLISH * 3)]
    assert curate(tmp_path, rows, language={"keep": ["en"]}).rows == rows[1:]


def test_a_higher_probability_leaves_out_more(tmp_path):
    rows = [{"text": f"{ENGLISH} {GERMAN}"}, {"text": ENGLISH}]
    assert curate(tmp_path / "low", rows, language={"keep": ["en", "de"], "min_probability": 0.9}).rows == rows
    assert curate(tmp_path / "high", rows, language={"keep": ["en"], "min_probability": 0.9}).rows == rows[1:]


@pytest.mark.parametrize("codes", [["english"], [], ["EN"]])
def test_unknown_languages_are_refused_by_the_recipe(codes):
    with pytest.raises(ValidationError, match=r"ISO 639|at least 1"):
        CurateConfig.model_validate({"kind": "curate", "datasets": ["mine"], "language": {"keep": codes}})
