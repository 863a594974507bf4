"""Reading a JSON list incrementally gives the same items as parsing the whole list at once."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.core.errors import DataError
from stages.data import json_values
from stages.data.json_values import JsonList

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def read(text, piece_characters):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "PIECE_CHARACTERS", piece_characters)
        return list(JsonList(io.StringIO(text), "train.json").elements())


@given(st.lists(values, max_size=5), st.integers(1, 40), st.sampled_from([None, 0, 2]))
def test_pieces_of_any_size_give_the_elements_and_their_lines(elements, piece_characters, indent):
    text = " \n" + json.dumps(elements, indent=indent) + "\n"
    found = read(text, piece_characters)
    assert [value for _, value in found] == elements
    if indent is None:
        assert all(line == 2 for line, _ in found)


@pytest.mark.parametrize("piece_characters", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1},\n  {"a" 2}]', "train.json:2 is not valid JSON: Expecting ':' delimiter at column 8"),
        ('[{"a": 1}\n  {"a": 2}]', "train.json:2 is not valid JSON: Expecting ',' or ']' at column 3"),
        ('[{"a": 1},\n', "train.json:2 is not valid JSON: Expecting value at column 1"),
        ('[1, 2\n,\n "x', "train.json:3 is not valid JSON: Unterminated string starting at at column 2"),
    ],
)
def test_what_is_malformed_is_named_by_line_and_column(text, message, piece_characters):
    with pytest.raises(DataError) as raised:
        read(text, piece_characters)
    assert str(raised.value).startswith(message)


def test_no_more_is_held_than_the_element_at_hand():
    class Endless(io.StringIO):
        served = 0

        def read(self, size=-1):
            self.served += size
            return super().read(size)

    stream = Endless("[" + ",".join(['{"text": "abc"}'] * 100_000) + "]")
    next(JsonList(stream, "train.json").elements())
    assert stream.served <= json_values.PIECE_CHARACTERS
