"""Regular expressions from recipes and data run within limits, and match as in Python."""

import re

import pytest
from pydantic import ValidationError

from stages.adapters.config import AdapterConfig
from stages.core import patterns as patterns_module
from stages.core.patterns import PatternError, Patterns, pattern_problem
from stages.kinds.quantize.config import QuantizeConfig

TEXTS = ["model.layers.1.q_proj", "abc\u0663", "", "a\nb", "Stra\N{LATIN SMALL LETTER SHARP S}e"]
ENDLESS = r"([a-z_.\d]+)+\.q_proj"


@pytest.fixture(scope="module")
def patterns():
    with Patterns(0.5) as started:
        yield started


@pytest.mark.parametrize(
    "pattern",
    [r".*\.\d+\.(q|k)_proj", r"[A-z]+\d", "", "a.b", r"(?i)STRA.E", r"(?=.*1)m", r"(?<=\.)q_", r"\Z", "$"],
)
def test_a_pattern_matches_what_it_matches_in_python(patterns, pattern):
    for how in ("search", "match", "re.fullmatch"):
        oracle = getattr(re, how.removeprefix("re."))
        expected = [0 if oracle(pattern, text) else None for text in TEXTS]
        assert patterns.first_matches([pattern], TEXTS, how) == expected
    assert patterns.first_matches(["no such text", pattern], ["model.layers.1.q_proj"], "search")[0] in (1, None)


@pytest.mark.parametrize(
    ("pattern", "text", "how"),
    [
        ("(?:a|aa)+$", "a" * 60 + "!", "search"),
        ("(a+)+$", "a" * 60 + "!", "re.fullmatch"),
        ("(?:(?:(?:(?:a{999}){999}){999}){999}){999}", "", "match"),
        ("(" * 9000 + ")" * 9000, "", "match"),
    ],
)
def test_a_pattern_that_takes_for_ever_is_ended(patterns, pattern, text, how):
    with pytest.raises(TimeoutError):
        patterns.first_matches([pattern], [text], how)


def test_what_is_no_pattern_says_why(patterns):
    with pytest.raises(PatternError, match="missing"):
        patterns.first_matches(["a", "("], ["a"], "match")
    assert pattern_problem("a{2}") is None


def test_a_recipe_with_a_pattern_that_takes_for_ever_on_names_of_layers_is_refused(monkeypatch):
    monkeypatch.setattr(patterns_module, "LIMIT_S", 0.3)
    with pytest.raises(ValidationError, match="takes over 2 s to compare with the name of a layer"):
        AdapterConfig(type="lora", rank=4, target_modules=ENDLESS)
    assert AdapterConfig(type="lora", rank=4, target_modules=r".*\.[qk]_proj").target_modules == r".*\.[qk]_proj"
    with pytest.raises(ValidationError, match="takes over 2 s to compare with the name of a layer"):
        QuantizeConfig.model_validate({"kind": "quantize", "ignore": [f"re:{ENDLESS}"]})
