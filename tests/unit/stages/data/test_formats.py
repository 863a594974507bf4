"""Rows of all formats give equal documents; each mistake is reported with the expected form."""

import json
from typing import get_args

import pytest

from stages.core.errors import DataError
from stages.data.config import DataFormat
from stages.data.formats import FORMATS, RowReader, likeliest_format
from stages.data.messages import Conversation, PlainText, RowError


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def system(content):
    return {"role": "system", "content": content}


def read(row, rows="examples", wanted="auto"):
    return RowReader(wanted, rows).read(row)


def tool(name):
    return {"type": "function", "function": {"name": name, "description": None, "parameters": None}}


CHAT = Conversation([user("a"), assistant("b")])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [user("a"), assistant("b")]}, CHAT),
        ({"messages": [user("a"), assistant("b")], "prompt": "a", "text": "x"}, CHAT),
        ({"messages": [system(""), user("a"), assistant("b")]}, Conversation([system(""), user("a"), assistant("b")])),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, CHAT),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
            Conversation([system("s"), user("a"), assistant("b")]),
        ),
        ({"instruction": "a", "output": "b"}, CHAT),
        ({"instruction": "a", "input": "", "output": "b"}, CHAT),
        ({"instruction": "a", "input": "x", "output": "b"}, Conversation([user("a\nx"), assistant("b")])),
        (
            {
                "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
                "tools": '[{"name": "f"}]',
            },
            Conversation([user("a"), assistant("b")], tools=(tool("f"),)),
        ),
        (
            {"messages": [user("a"), assistant("b")], "chat_template_kwargs": '{"thinking": true}'},
            Conversation([user("a"), assistant("b")], variables={"thinking": True}),
        ),
        (
            {"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]]},
            Conversation([system("s"), user("a"), assistant("b"), user("c"), assistant("d")]),
        ),
        (
            {"messages": [user("a"), assistant("b") | {"loss": False}, user("c"), assistant("d") | {"loss": True}]},
            Conversation([user("a"), assistant("b"), user("c"), assistant("d")], unlearned=frozenset({1})),
        ),
        (
            {"messages": [user("a"), assistant("b") | {"weight": 0}, user("c"), assistant("d")], "system": "s"},
            Conversation([system("s"), user("a"), assistant("b"), user("c"), assistant("d")], unlearned=frozenset({2})),
        ),
        (
            {"prompt": "a", "completion": [assistant("b")], "system": "s"},
            Conversation([system("s"), user("a"), assistant("b")], 2),
        ),
        ({"prompt": "a", "completion": "b"}, PlainText("a", "b")),
        ({"prompt": [user("a")], "completion": [assistant("b")]}, Conversation([user("a"), assistant("b")], 1)),
        ({"prompt": "a", "completion": [assistant("b")]}, Conversation([user("a"), assistant("b")], 1)),
        ({"text": "a b"}, PlainText("", "a b")),
    ],
)
def test_a_training_row_of_every_format_is_recognised_and_read(row, expected):
    assert read(row) == (expected,)


PAIR = (Conversation([user("a"), assistant("b")], 1), Conversation([user("a"), assistant("c")], 1))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}, PAIR),
        ({"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]}, PAIR),
        ({"prompt": "a", "chosen": [assistant("b")], "rejected": [assistant("c")]}, PAIR),
        ({"prompt": "a", "chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}, PAIR),
        ({"prompt": [user("a")], "chosen": "b", "rejected": "c"}, PAIR),
        (
            {"prompt": "a", "chosen": [assistant("b")], "rejected": [assistant("c")], "system": "s"},
            tuple(Conversation([system("s"), user("a"), assistant(answer)], 2) for answer in "bc"),
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, (PlainText("a", "b"), PlainText("a", "c"))),
        (
            {"chosen": "Q: a A: no", "rejected": "Q: a A: nope"},
            (PlainText("Q: a A: ", "no"), PlainText("Q: a A: ", "nope")),
        ),
    ],
)
def test_a_preference_of_every_form_is_read(row, expected):
    assert read(row, rows="pairs") == expected


def test_a_shared_history_belongs_to_the_prompt():
    history = [user("a"), assistant("b"), user("c")]
    chosen, rejected = read({"chosen": [*history, assistant("d")], "rejected": [*history, assistant("e")]}, "pairs")
    assert (chosen.num_prompt_messages, rejected.num_prompt_messages) == (3, 3)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("text", "is a string; expected an object with named columns"),
        ({"messages": None}, "has null in `messages`; expected a list of messages {role, content}"),
        ({"messages": []}, "has an empty list in `messages`; expected messages"),
        ({"messages": ["a"]}, "has a string as message 1 of `messages`; expected an object with `role`, `content`"),
        (
            {"messages": [{"role": "user"}]},
            "has `role` as message 1 of `messages`; expected an object with `role`, `content`",
        ),
        ({"messages": [user("a"), {"role": "bot", "content": "b"}]}, "has the unknown role 'bot' in message 2"),
        (
            {"messages": [user("a"), assistant(7)]},
            "has a number as `content` of message 2 of `messages`; expected a string",
        ),
        ({"messages": [user("a"), assistant([{"type": "text"}])]}, "has a list as `content` of message 2"),
        ({"messages": [user(" "), assistant("b")]}, "has an empty `content` in message 1 of `messages`; expected text"),
        ({"messages": [user("a")]}, "has no assistant turn, so there is nothing to learn; expected at least one"),
        ({"messages": [system("a")]}, "has no assistant turn"),
        ({"messages": [assistant("a"), user("b")]}, "has `assistant` in message 1 where `user` was expected"),
        (
            {"messages": [user("a"), system("s"), assistant("b")]},
            "has `system` in message 2 where `assistant` was expected",
        ),
        (
            {"messages": [system("s"), user("a"), assistant("b"), assistant("c")]},
            "has `assistant` in message 4 where `user`",
        ),
        ({"messages": [user("a"), assistant("b"), user("c")]}, "ends with a `user` message"),
        (
            {"messages": [user("a"), {**assistant("b"), "tool_calls": [1]}]},
            "has no function name in tool call 1 of message 2",
        ),
        (
            {"messages": [user("a"), {"role": "assistant", "tool_calls": [call("add", "[1]")]}]},
            "has a list as `arguments` of tool call 1 of message 2 of `messages`; expected an object",
        ),
        (
            {"messages": [user("a"), assistant("b"), {"role": "tool", "content": "3"}]},
            "has `tool` in message 3 where `user` was expected",
        ),
        (
            {"messages": [user("a"), {"role": "assistant", "tool_calls": [call("add", {})]}, assistant("3")]},
            "has `assistant` in message 3 where `tool` was expected",
        ),
        (
            {"messages": [{**user("a"), "reasoning_content": "b"}, assistant("c")]},
            "has `reasoning_content` in message 1 of `messages`, of the role `user`; expected it from the assistant",
        ),
        ({"messages": [user("a"), {**assistant("b"), "thinking": 7}]}, "has a number as `thinking` of message 2"),
        ({"messages": [user("a"), assistant("b")], "tools": "add"}, "has a string in `tools`; expected a list"),
        (
            {"messages": [user("a"), assistant("b")], "tools": [{"type": "web_search"}]},
            "has no function name in tool 1 of `tools`; expected {type: function, function: {name, description,",
        ),
        (
            {
                "messages": [user("a"), assistant("b")],
                "tools": [{"name": "f"}, {"function": {"name": "g", "parameters": [1]}}],
            },
            "has a list as `parameters` of tool 2 of `tools`; expected an object",
        ),
        (
            {"messages": [user("a"), assistant("b")], "tools": [{"name": "f", "description": 1}]},
            "has a number as `description` of tool 1 of `tools`; expected a string",
        ),
        ({"prompt": "a", "completion": "b", "tools": [{"name": "f"}]}, "has a column `tools` beside plain text"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "it", "value": "b"}]},
            "has the unknown role 'it'",
        ),
        ({"conversations": [user("a"), assistant("b")]}, "expected an object with `from`, `value`"),
        ({"instruction": "a", "output": ""}, "has an empty `output`; expected text"),
        ({"instruction": 1, "output": "a"}, "has a number in `instruction`; expected a string"),
        ({"prompt": "a", "completion": None}, "has null in `completion`; expected a string"),
        ({"text": {}}, "has an object in `text`; expected a string"),
        ({"text": "\n"}, "has an empty `text`; expected text"),
    ],
)
def test_what_is_wrong_with_a_training_row_is_named_with_what_was_expected(row, message):
    with pytest.raises(RowError) as raised:
        read(row)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "has the same `chosen` and `rejected`"),
        ({"prompt": "a", "chosen": "b", "rejected": 1}, "has a number in `rejected`; expected a string"),
        (
            {"chosen": "yes", "rejected": "no"},
            "has no `prompt`, and `chosen` and `rejected` do not begin with a common one",
        ),
        ({"prompt": [user("x")], "chosen": [user("a"), assistant("b")], "rejected": "c"}, "begins with another prompt"),
        (
            {"chosen": [user("a"), assistant("b")], "rejected": [user("x"), assistant("b")]},
            "first differ in message 1, of the role `user`",
        ),
        (
            {"chosen": [user("a"), assistant("b"), user("c"), assistant("d")], "rejected": [user("a"), assistant("b")]},
            "has an answer that the other one goes on from",
        ),
        ({"chosen": [assistant("b")], "rejected": [assistant("c")]}, "has `assistant` in message 1 where `user`"),
    ],
)
def test_what_is_wrong_with_a_preference_is_named(row, message):
    with pytest.raises(RowError) as raised:
        read(row, rows="pairs")
    assert message in str(raised.value)


def test_the_first_row_tells_the_format_of_all():
    reader = RowReader("auto", "examples")
    reader.read({"text": "a"})
    with pytest.raises(RowError, match="has no `text`; found `messages`"):
        reader.read({"messages": [user("a"), assistant("b")]})


def test_unknown_columns_are_an_error_that_lists_them_and_every_format():
    with pytest.raises(
        DataError, match=r"has the columns `question`, `answer`; expected messages \(`messages`\);.*text"
    ):
        read({"question": "a", "answer": "b"})


def test_the_wrong_method_for_the_data_is_an_error_that_names_the_right_one():
    with pytest.raises(DataError, match="`method: dpo` learns from them"):
        read({"chosen": "a", "rejected": "b"})
    with pytest.raises(DataError, match=r"expected .*; preference \(`chosen`, `rejected`\); "):
        read({"text": "a"}, rows="pairs")
    with pytest.raises(DataError, match="These are labelled answers: `method: kto` learns from them"):
        read({"prompt": "a", "completion": "b", "label": True}, rows="pairs")
    with pytest.raises(DataError, match="and simpo, orpo, cpo and reward"):
        read({"prompt": "q", "chosen": "a", "rejected": "b"}, rows="labelled")
    with pytest.raises(DataError, match="These are examples: `method: sft` learns from them"):
        read({"prompt": "a", "completion": "b"}, rows="labelled")
    with pytest.raises(DataError, match="format 'text' does not suit the method"):
        read({"text": "a"}, rows="pairs", wanted="text")


def test_a_named_format_wins_over_the_columns():
    assert read({"messages": [], "text": "a"}, wanted="text") == (PlainText("", "a"),)


def test_thoughts_and_tool_calls_are_kept_with_arguments_as_an_object():
    row = {
        "messages": [
            {**user("What is 1 + 2?"), "tool_calls": None, "reasoning_content": None},
            {
                "role": "assistant",
                "content": None,
                "thinking": "I add.",
                "tool_calls": [call("add", '{"a": 1, "b": 2}')],
            },
            {"role": "tool", "content": "3", "name": "add", "tool_call_id": "1"},
            {**assistant("3"), "reasoning_content": "So it is 3."},
        ],
        "tools": '[{"type": "function", "function": {"name": "add"}}]',
    }
    (conversation,) = read(row)
    assert conversation.messages == [
        user("What is 1 + 2?"),
        {**assistant(""), "thinking": "I add.", "tool_calls": [call("add", {"a": 1, "b": 2})]},
        {"role": "tool", "content": "3", "name": "add", "tool_call_id": "1"},
        {**assistant("3"), "reasoning_content": "So it is 3."},
    ]
    assert conversation.tools == (tool("add"),)


PARAMETERS = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "row",
    [
        {"name": "add", "description": "Adds.", "parameters": PARAMETERS},
        {"parameters": json.dumps(PARAMETERS), "description": "Adds.", "name": "add"},
        {"function": {"parameters": PARAMETERS, "name": "add", "description": "Adds."}, "type": "function"},
        {"function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}},
        {"type": "function", "name": "add", "description": "Adds.", "parameters": PARAMETERS, "returns": "a number"},
    ],
    ids=["bare", "another order, JSON text", "wrapped in another order", "without type", "flat, with another field"],
)
def test_tools_are_rendered_as_vllm_does_however_a_row_writes_them(row):
    reader = RowReader("auto", "examples")
    (conversation,) = reader.read({"messages": [user("a"), assistant("b")], "tools": [row]})
    served = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}  # FunctionDefinition of vLLM, dumped
    assert json.dumps(conversation.tools) == json.dumps([{"type": "function", "function": served}])
    assert dict(reader.unread.counts) == ({"tools[].returns": 1} if "returns" in row else {})


def test_what_a_definition_lacks_is_null_as_vllm_writes_it():
    (conversation,) = read({"messages": [user("a"), assistant("b")], "tools": [{"name": "f", "strict": False}]})
    assert json.dumps(conversation.tools[0]["function"]) == (
        '{"name": "f", "description": null, "parameters": null, "strict": false}'
    )


def test_columns_of_other_names_are_read_as_those_of_formats():
    row = {"question": "2 + 2?", "answer": "4", "label": None}
    assert RowReader("auto", "examples", {"question": "query", "answer": "response"}).read(row) == (
        Conversation([user("2 + 2?"), assistant("4")]),
    )
    assert RowReader("auto", "examples", {"question": "prompt", "answer": "completion"}).read(row) == (
        PlainText("2 + 2?", "4"),
    )
    judged = RowReader("auto", "labelled", {"q": "query", "question": "prompt", "answer": "completion", "ok": "label"})
    for is_good in (True, False):
        content = {**row, "ok": is_good}
        assert judged.read(content) == (PlainText("2 + 2?", "4"),)
        assert judged.label(content) is is_good
    scored = RowReader("auto", "pairs", {"better": "chosen", "worse": "rejected", "by": "margin"})
    pair = {"prompt": "2 + 2?", "better": "4", "worse": "5", "by": 2}
    assert len(scored.read(pair)) == 2 and scored.margin(pair) == 2
    swapped = RowReader("auto", "examples", {"prompt": "completion", "completion": "prompt"})
    assert swapped.read({"prompt": "4", "completion": "2 + 2?"}) == (PlainText("2 + 2?", "4"),)


def test_two_columns_are_not_read_as_one_and_no_column_is_an_error_with_a_way_out():
    reader = RowReader("auto", "examples", {"question": "prompt"})
    with pytest.raises(RowError, match="has `prompt`, `question`, which are both read as `prompt`; expected one"):
        reader.read({"prompt": "a", "question": "b", "completion": "c"})
    assert reader.read({"prompt": None, "question": "b", "completion": "c"}) == (PlainText("b", "c"),)
    with pytest.raises(DataError, match=r"such as `columns: \{question: query, answer: response\}`"):
        read({"question": "2 + 2?", "answer": "4"})


def test_a_table_has_every_column_in_every_row_and_lists_as_text_where_it_has_no_lists():
    table = {"messages": [user("a"), assistant("b")], "rejected_response": None, "chosen": None, "rejected": None}
    assert likeliest_format(table) == "messages"
    assert likeliest_format({**table, "rejected_response": "c"}) == "rejected_response"
    assert likeliest_format({**table, "label": False}) == "labelled_messages"
    assert likeliest_format({**table, "label": "science"}) == "messages"
    assert likeliest_format(dict.fromkeys(table)) is not None
    text = {name: json.dumps(value) if value else value for name, value in table.items()}
    assert read(text) == (CHAT,)


def test_messages_beside_whole_conversations_are_no_prompt():
    chosen, rejected = ([user("a"), assistant(answer)] for answer in "bc")
    row = {"prompt": "a", "messages": chosen, "chosen": chosen, "rejected": rejected}
    assert likeliest_format(row) == "preference"
    assert read(row, rows="pairs") == (Conversation(chosen, 1), Conversation(rejected, 1))


@pytest.mark.parametrize(
    ("asked", "first", "second"),
    [
        (
            {"conversations": [{"from": "human", "value": "a"}]},
            {"from": "gpt", "value": "b"},
            {"from": "gpt", "value": "c"},
        ),
        ({"messages": [user("a")]}, assistant("b"), assistant("c")),
        ({"prompt": [user("a")]}, assistant("b"), assistant("c")),
        ({"prompt": "a"}, {"from": "gpt", "value": "b"}, [{"from": "gpt", "value": "c"}]),
        ({"instruction": "a"}, "b", "c"),
    ],
)
def test_answers_may_be_single_messages_under_both_names(asked, first, second):
    row = {**asked, "system": "s", "chosen": first, "rejected": second}
    system = {"role": "system", "content": "s"}
    assert FORMATS[likeliest_format(row)].rows == "pairs"
    assert read(row, rows="pairs") == tuple(
        Conversation([system, user("a"), assistant(answer)], 2) for answer in ("b", "c")
    )


def test_parts_of_content_are_text_thoughts_and_calls_and_their_weights_count():
    def part(kind, value):
        return {"type": kind, "value": value}

    row = {
        "messages": [
            {"role": "user", "content": [part("text", "1 + "), part("text", "2?")], "loss_weight": 0.0},
            {
                "role": "assistant",
                "content": [part("reasoning", "I add."), part("tool_call", '{"name": "add", "arguments": {"a": 1}}')],
                "loss_weight": 0.0,
            },
            {"role": "tool", "content": [part("text", "3")], "loss_weight": 0.0},
            {"role": "assistant", "content": [part("text", "3")], "loss_weight": 1.0},
        ]
    }
    (conversation,) = read(row)
    assert conversation.messages == [
        user("1 + 2?"),
        {**assistant(""), "reasoning_content": "I add.", "tool_calls": [call("add", {"a": 1})]},
        {"role": "tool", "content": "3"},
        assistant("3"),
    ]
    assert conversation.unlearned == {1}
    with pytest.raises(RowError, match="has media in `content`, which this model, or this stage, does not read"):
        read({"messages": [{"role": "user", "content": [part("image_url", "x")]}, assistant("b")]})


def test_a_bad_answer_is_not_imitated_whatever_its_mark_is_called():
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "kto_tag": False}
    with pytest.raises(RowError, match="`method: kto` learns from both"):
        read(row)
    reader = RowReader("auto", "labelled")
    assert (reader.read(row), reader.label(row)) == ((Conversation([user("a"), assistant("b")], 1),), False)


def test_every_format_that_a_recipe_may_name_is_in_the_table():
    assert {"auto", *FORMATS} == set(get_args(DataFormat))
