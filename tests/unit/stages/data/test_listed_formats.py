"""Row formats of TRL and ms-swift are read as the documentation of recipes says."""

import json
import re
from pathlib import Path

import pytest

from stages.core.errors import DataError
from stages.data.any_rows import PromptReader
from stages.data.formats import FORMATS, RowReader, likeliest_format
from stages.data.media.folder import MediaFolder
from stages.data.messages import Conversation, RowError
from tests.unit.stages.data.media.conftest import encoded, noise, sound, video

PAGE = Path(__file__).parents[4] / "configs" / "formats.md"
WITH_MEDIA = {
    " with pictures": ("x.png", encoded(noise())),
    " with videos": ("x.mp4", video()),
    " with sounds": ("x.wav", sound()),
}
"""Endings of what rows with media are read as, each with the file that such a row names."""
LISTED = re.findall(r"^\| ([^|`]+) \| `(\{.*\})` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def likeliest_rows(row):
    form = likeliest_format(row)
    return FORMATS[form].rows if form else "examples"


def documents(row, name):
    form = FORMATS[name]
    assert RowReader("auto", form.rows).read(row) == RowReader(name, form.rows).read(row)
    return RowReader("auto", form.rows).read(row)


@pytest.mark.parametrize(
    ("theirs", "example", "read_as"), LISTED, ids=[f"{n} {one[0]}" for n, one in enumerate(LISTED)]
)
def test_a_listed_row_is_read_or_refused_by_name(theirs, example, read_as, tmp_path):
    row = json.loads(example)
    for ending in (one for one in WITH_MEDIA if read_as.endswith(one)):
        path, content = WITH_MEDIA[ending]
        (tmp_path / path).write_bytes(content)
        name = read_as.removesuffix(ending).strip("`")
        found = RowReader("auto", FORMATS[name].rows, media=MediaFolder.of(tmp_path, [])).read(row)
        assert [[one.path for one in document.media] for document in found] == [[path]] * len(found)
        read_as = "refused: does not read"
    if read_as.startswith("refused: "):
        with pytest.raises((RowError, DataError), match=read_as.removeprefix("refused: ")):
            RowReader("auto", likeliest_rows(row)).read(row)
    elif read_as == "prompts":
        prompt = PromptReader(None).read(row)
        assert prompt.reference == row.get("solution")
        with pytest.raises((RowError, DataError)):
            RowReader("auto", "examples").read(row)
    else:
        assert documents(row, read_as.strip("`"))


def test_all_formats_are_listed_and_enough_of_them():
    assert {re.sub(" with .*", "", name).strip("`") for _, _, name in LISTED if name.startswith("`")} == FORMATS.keys()
    assert len(LISTED) > 30


def said(document):
    assert isinstance(document, Conversation)
    return [(message["role"], message["content"]) for message in document.messages]


def row_of(theirs, start=""):
    return next(json.loads(row) for name, row, _ in LISTED if name == theirs and row.startswith(start))


def test_rejected_answers_take_the_place_of_the_last_one():
    for theirs in ("ms-swift: DPO, ORPO, CPO, SimPO, RM", "the same, whole"):
        chosen, rejected = RowReader("auto", "pairs").read(row_of(theirs))
        assert said(chosen) == [("user", "2 + 2?"), ("assistant", "4")]
        assert said(rejected) == [("user", "2 + 2?"), ("assistant", "5")]
        assert chosen.num_prompt_messages == rejected.num_prompt_messages == 1


def test_the_label_of_messages_is_of_their_last_answer():
    row = {
        "messages": [*row_of("ms-swift: messages")["messages"], *row_of("ms-swift: KTO")["messages"]],
        "label": False,
    }
    reader = RowReader("auto", "labelled")
    (document,) = reader.read(row)
    assert (document.num_prompt_messages, reader.label(row)) == (4, False)


def test_turns_of_one_object_and_of_query_and_history_are_turns():
    (document,) = documents(row_of("ms-swift: ShareGPT"), "human_assistant")
    assert said(document) == [("system", "Add."), ("user", "2 + 2?"), ("assistant", "4")]
    (document,) = documents(row_of("ms-swift: query-response"), "query_response")
    assert said(document)[1:] == [("user", "2 + 2?"), ("assistant", "4"), ("user", "3 + 3?"), ("assistant", "6")]


@pytest.mark.parametrize("theirs", ["loss of single turns", "weight of single turns", "loss of single calls"])
def test_turns_without_loss_are_context(theirs):
    (document,) = documents(row_of(f"ms-swift: {theirs}"), "messages")
    assert document.unlearned == {1}


def test_calls_of_one_turn_are_learned_together_or_not_at_all():
    user, call, response, answer = row_of("ms-swift: loss of single calls")["messages"]
    with pytest.raises(RowError, match="has a call in message 3 that is to be learned, unlike the text or the call"):
        documents({"messages": [user, call, {**call, "loss": True}, response, response, answer]}, "messages")
    with pytest.raises(RowError, match=r"has 0\.5 as `loss_scale` of message 4; expected true or false, 1 or 0"):
        documents({"messages": [user, call, response, {**answer, "loss_scale": 0.5}]}, "messages")


def test_calls_of_sharegpt_are_those_of_messages():
    listed = row_of("ms-swift: loss of single calls")["messages"]
    named = {"user": "human", "tool_call": "function_call", "tool_response": "observation", "assistant": "gpt"}
    turns = [{"from": named[one["role"]], "value": one["content"], "loss": one.get("loss")} for one in listed]
    assert documents({"conversations": turns}, "sharegpt") == documents({"messages": listed}, "messages")


def test_calls_of_agents_are_calls_of_the_assistant_with_what_it_says_before_them():
    row = row_of("ms-swift: agents")
    (document,) = documents(row, "messages")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    assert [message["role"] for message in document.messages] == ["user", "assistant", "tool", "assistant"]
    assert document.messages[1]["tool_calls"] == [call]
    assert [one["function"]["name"] for one in document.tools] == ["add"]
    user, one, response, answer = row["messages"]
    thought = {"role": "assistant", "content": "I add.", "loss": False}
    (document,) = documents({**row, "messages": [user, thought, one, one, response, response, answer]}, "messages")
    assert (document.messages[1]["content"], document.messages[1]["tool_calls"]) == ("I add.", [call, call])
    assert document.unlearned == {1}
    with pytest.raises(RowError, match="has a string as the call in message 2"):
        documents({**row, "messages": [user, {**one, "content": "add"}, response, answer]}, "messages")


@pytest.mark.parametrize(
    ("row", "rows", "message"),
    [
        ({"conversation": []}, "examples", "has a list in `conversation`"),
        ({"conversation": [{"human": "a"}]}, "examples", "has null in `assistant`; expected a string"),
        ({"query": "a", "response": ""}, "examples", "has an empty `response`"),
        ({"messages": "a", "rejected_response": "b"}, "pairs", "has a string in `messages`"),
        ({"messages": [], "rejected_response": "b"}, "pairs", "has an empty list in `messages`"),
        ({"messages": [{"role": "user", "content": "a"}], "rejected_messages": 1}, "pairs", "`rejected_messages`"),
    ],
)
def test_what_is_wrong_is_said_in_the_words_of_the_row(row, rows, message):
    with pytest.raises(RowError) as raised:
        RowReader("auto", rows).read(row)
    assert message in str(raised.value)
