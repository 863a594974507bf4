"""Loss masks under published chat templates, checked by marker words that only one turn contains.

Expected masks follow from these words, and from hand-written texts that stand before a turn and end it, not from our
code.
"""

import re

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from stages.data import turns
from stages.data.config import DEFAULT_DATE
from stages.data.formats import Conversation
from stages.data.messages import RowError
from stages.data.proved_template import ProvedTemplate
from stages.data.templates import ChatTemplate
from tests.unit.stages.data.chat_templates import MARKERS, published, trl_template

TEMPLATES = published()


def user(number):
    return {"role": "user", "content": f"ask{number}"}


def says(number, thinks=False, inline=False):
    if inline:
        return {"role": "assistant", "content": f"<think>\nmull{number}\n</think>\n\nsay{number}"}
    return {"role": "assistant", "content": f"say{number}"} | ({"reasoning_content": f"mull{number}"} if thinks else {})


def calls(*numbers, text="", thinks=False):
    made = [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": f"say{number}call", "arguments": {"x": f"say{number}argument"}},
        }
        for number in numbers
    ]
    thoughts = {"reasoning_content": f"mull{numbers[0]}"} if thinks else {}
    return {"role": "assistant", "content": text, "tool_calls": made} | thoughts


def gives(number):
    return {"role": "tool", "content": f"give{number}", "name": f"call{number}", "tool_call_id": f"call{number:05}"}


SYSTEM = {"role": "system", "content": "rule1"}
ADD = {
    "type": "function",
    "function": {
        "name": "define1",
        "description": "define2",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "define3"}}},
    },
}
CONVERSATIONS = {
    "one": ([user(1), says(1)], ""),
    "two": ([user(1), says(1), user(2), says(2)], ""),
    "four": ([message for number in (1, 2, 3, 4) for message in (user(number), says(number))], ""),
    "system": ([SYSTEM, user(1), says(1)], "system"),
    "system and two": ([SYSTEM, user(1), says(1), user(2), says(2)], "system"),
    "thoughts": ([user(1), says(1, thinks=True)], "thoughts"),
    "thoughts in the text": ([user(1), says(1, inline=True)], ""),
    "thoughts twice": ([user(1), says(1, thinks=True), user(2), says(2, thinks=True)], "thoughts"),
    "thoughts in both texts": ([user(1), says(1, inline=True), user(2), says(2, inline=True)], ""),
    "thoughts, then none": ([user(1), says(1, thinks=True), user(2), says(2)], "thoughts"),
    "none, then thoughts": ([user(1), says(1), user(2), says(2, thinks=True)], "thoughts"),
    "call": ([user(1), calls(1), gives(1), says(2)], "calls"),
    "call of a definition": ([user(1), calls(1), gives(1), says(2)], "tools calls"),
    "calls twice": (
        [user(1), calls(1), gives(1), says(2), user(2), calls(3), gives(3), says(4)],
        "tools calls again",
    ),
    "parallel calls": ([user(1), calls(1, 2), gives(1), gives(2), says(3)], "tools calls parallel"),
    "text beside a call": ([user(1), calls(1, text="say0"), gives(1), says(2)], "tools calls beside"),
    "thoughts before a call": ([user(1), calls(1, thinks=True), gives(1), says(2, thinks=True)], "calls thoughts"),
}


def chat_template(template):
    return ChatTemplate(template.source, dict(template.special_tokens), MARKERS, "the template")


def proved_template(name):
    """Return a chat template that renders in the test's own process, where its work can be counted."""
    template = TEMPLATES[name]
    return ProvedTemplate(template.source, dict(template.special_tokens), MARKERS, "the template", DEFAULT_DATE)


def learn(template, conversation, turns="together"):
    messages, features = CONVERSATIONS[conversation]
    return template.documents(Conversation(messages, tools=(ADD,) if "tools" in features else ()), turns)


def words(*texts):
    """Return the marker words in texts, each of one message only; a tool call's name, which may repeat, once."""
    found = re.findall(r"(?:ask|say|mull|rule|give|define)\d\w*", "\n".join(texts))
    return [word for number, word in enumerate(found) if not (word.endswith("call") and word in found[:number])]


@pytest.mark.parametrize("turns", ["together", "separately"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_each_turn_is_learned_once_and_nothing_that_others_say(name, turns):
    template = TEMPLATES[name]
    chat = chat_template(template)
    for conversation, (messages, features) in CONVERSATIONS.items():
        if set(features.split()) & set(template.lacks.split()):
            with pytest.raises(RowError):
                learn(chat, conversation, turns)
            continue
        num_dropped_before = chat.num_dropped_thoughts
        documents = learn(chat, conversation, turns)
        spans = [(document.text, *span) for document in documents for span in document.spans]
        learned = [text[begin:end] for text, begin, end in spans]
        said = [word for word in words(str(messages)) if word.startswith(("say", "mull"))]
        missing = set(said) - set(words(*learned))
        assert sorted(words(*learned)) == sorted({*said} - missing), conversation
        assert all(word.startswith("mull") for word in missing), conversation
        assert len(missing) == chat.num_dropped_thoughts - num_dropped_before, conversation
        assert not (missing and turns == "separately"), conversation
        assert all(text[:begin].endswith(template.before) for text, begin, _ in spans), (conversation, spans)
        assert all(text.rstrip().endswith(template.end) for text in learned), (conversation, learned)


REWRITTEN = re.compile("deepseek|qwq|mistral-0.3|gptoss|nemotron|smollm|granite|lfm2_2_5|llama3_2|gemma4|muse")
"""Templates that rewrite answers or write the date, so that their texts differ from Transformers' rendering."""


@pytest.mark.parametrize("name", [name for name in TEMPLATES if not REWRITTEN.match(name)])
def test_the_last_document_is_what_transformers_renders(name):
    template = TEMPLATES[name]
    chat = chat_template(template)
    for conversation, (messages, features) in CONVERSATIONS.items():
        if not set(features.split()) & set(template.lacks.split()):
            tools = [ADD] if "tools" in features else None
            expected, _ = render_jinja_template(
                [messages], tools, chat_template=template.source, **dict(template.special_tokens)
            )
            assert learn(chat, conversation)[-1].text == expected[0], conversation


def test_templates_that_write_more_after_the_last_turn_are_known():
    found = {name: chat_template(template).learned_after_turns for name, template in TEMPLATES.items()}
    more = {"phi3": "\n<|endoftext|>", "phi3_5": "\n<|endoftext|>", "phi-4-mini": "<|endoftext|>"}
    assert {name: text for name, text in found.items() if text} == more


@pytest.mark.parametrize("name", ["phi3", "phi3_5", "llama3", "gemma", "gemma3", "cohere", "cohere2", "qwen2_5"])
def test_masks_are_those_of_trls_training_templates(name):
    template = TEMPLATES[name]
    for conversation in ("one", "two", "four"):
        (document,) = learn(chat_template(template), conversation)
        texts, spans = render_jinja_template(
            [CONVERSATIONS[conversation][0]],
            chat_template=trl_template(f"{name}_training"),
            return_assistant_tokens_mask=True,
            **dict(template.special_tokens),
        )
        marked = "".join(texts[0][begin:end] for begin, end in spans[0])
        assert texts[0] == document.text
        learned = "".join(document.text[begin:end] for begin, end in document.spans)
        assert "".join(learned.split()) == "".join(marked.split())


@pytest.mark.parametrize(
    ("name", "variable", "conversation", "chosen"),
    [
        ("deepseek-v3.1", "thinking", "thoughts", True),
        *(
            (name, variable, conversation, chosen)
            for name, variable in (
                ("deepseek-v3.1", "thinking"),
                ("qwen3", "enable_thinking"),
                ("qwen3_5_think", "enable_thinking"),
                ("smollm-3", "enable_thinking"),
            )
            for conversation in ("one", "two")
            for chosen in (True, False)
        ),
    ],
)
def test_what_a_row_sets_for_the_template_is_set_as_transformers_sets_it(name, variable, conversation, chosen):
    """A row that sets a template variable gets Transformers' prompt, and the text with a loss begins right after it."""
    template, (messages, _) = TEMPLATES[name], CONVERSATIONS[conversation]
    (*_, document) = chat_template(template).documents(Conversation(messages, variables={variable: chosen}))
    options = {**dict(template.special_tokens), variable: chosen, "strftime_now": lambda _: "01 January 2026"}
    prompts, _ = render_jinja_template(
        [messages[:-1]], chat_template=template.source, add_generation_prompt=True, **options
    )
    assert document.text.startswith(prompts[0])
    begin, end = document.spans[-1]
    assert begin == len(prompts[0])
    assert words(document.text[begin:end])[-1] == words(messages[-1]["content"])[-1]


def test_thoughts_of_a_row_that_asks_for_none_are_not_left_out():
    template, (messages, _) = TEMPLATES["deepseek-v3.1"], CONVERSATIONS["thoughts"]
    with pytest.raises(RowError, match="has thoughts in message 2, which the template leaves out"):
        chat_template(template).documents(Conversation(messages, variables={"thinking": False}))


def test_the_row_decides_not_the_thoughts():
    """A row with `enable_thinking: false` gets no empty thoughts from a template that adds them by default."""
    template, (messages, _) = TEMPLATES["qwen3"], CONVERSATIONS["one"]
    documents = {
        chosen: chat_template(template).render(Conversation(messages, variables={"enable_thinking": chosen}))
        for chosen in (True, False)
    }
    learned = {chosen: one.text[slice(*one.spans[0])] for chosen, one in documents.items()}
    assert learned == {True: "<think>\n\n</think>\n\nsay1<|im_end|>", False: "say1<|im_end|>"}


def num_rendered_messages(chat, num_turns, turns, monkeypatch):
    """Return the total number of messages that are rendered while one conversation is tokenized."""
    messages = [message for number in range(num_turns) for message in (user(number), says(number, thinks=True))]
    chat.documents(Conversation(messages[:2]), together=True)  # what is found out of the template once
    rendered = []
    run = chat._sandbox.run
    with monkeypatch.context() as counting:
        counting.setattr(chat._sandbox, "run", lambda given: rendered.append(len(given["messages"])) or run(given))
        chat.documents(Conversation(messages), together=turns == "together")
    return sum(rendered)


@pytest.mark.parametrize("turns", ["together", "separately"])
def test_work_grows_with_the_square_of_the_turns_and_no_faster(monkeypatch, turns):
    """Rendering takes work of at most the square of a conversation's turns, however many documents learn a turn."""
    few, many = (num_rendered_messages(proved_template("qwen3"), num, turns, monkeypatch) for num in (15, 60))
    assert many / few < 5 * 4


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
def test_a_conversation_of_thousands_of_turns_is_refused_by_name_before_it_is_rendered(monkeypatch, name):
    chat = proved_template(name)
    messages = [message for number in range(3000) for message in (user(number), says(number))]
    chat.documents(Conversation(messages[:2]), together=True)
    monkeypatch.setattr(chat._sandbox, "run", lambda _: pytest.fail("rendered"))
    with pytest.raises(RowError, match=r"has 6,000 messages: .* split the conversation"):
        chat.documents(Conversation(messages), together=True)


def test_what_turns_out_to_be_too_much_is_refused_on_the_way(monkeypatch):
    """A conversation that needs too many documents, for turns that a template rewrites, is refused while rendered."""
    monkeypatch.setattr(turns, "MAX_MESSAGES", 500)
    messages = [message for number in range(20) for message in (user(number), says(number, thinks=True))]
    with pytest.raises(RowError, match=r"has 40 messages: .* more than 500 would be in all"):
        proved_template("qwen3").documents(Conversation(messages), together=False)


def test_one_rendering_is_enough_where_everything_is_learned(monkeypatch):
    chat = proved_template("chatml")
    messages = [message for number in range(3000) for message in (user(number), says(number))]
    rendered = []
    run = chat._sandbox.run
    monkeypatch.setattr(chat._sandbox, "run", lambda given: rendered.append(1) or run(given))
    chat.text(Conversation(messages))
    assert len(rendered) == 1
