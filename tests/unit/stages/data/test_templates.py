"""Loss masks under chat templates of several styles, token by token."""

import pytest

from stages.core.errors import DataError
from stages.data.messages import Conversation, PlainText, RowError
from stages.data.templates import ChatTemplate
from tests.unit.stages.data.conftest import CHATML

HEADERS = (  # as Llama 3 does it
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|header|>' + message['role'] + '<|end_header|>\n\n' + message['content'] | trim + '<|eot|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|end_header|>\n\n' }}{% endif %}"
)
INSTRUCTIONS = (  # as Mistral does it: no role names, the system prompt inside the first question, no generation prompt
    "{{ bos_token }}"
    "{% set system = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + (system if loop.index0 <= 1 else '') + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
THOUGHTS = (  # as models that think do it: only the last answer shows its (here empty) thoughts
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if loop.last and message['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (  # counts the messages first, so only its marks can tell the turns
    "{{ messages | length }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ 'A:' }}{% generation %}{{ message['content'] + '<|eot|>' }}{% endgeneration %}"
    "{% else %}{{ 'U:' + message['content'] }}{% endif %}"
    "{% endfor %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
LABELS = (  # no special tokens at all
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def chat(*contents: str, system: str | None = None, prompt: int = 0) -> Conversation:
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": content} for number, content in enumerate(contents)
    ]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(messages, prompt)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HEADERS, ["yes<|eot|>", "so<|eot|>"]),
        (INSTRUCTIONS, [" yes</s>", " so</s>"]),
        (MARKED, ["yes<|eot|>", "so<|eot|>"]),
        (THOUGHTS, ["yes<|im_end|>", "<think>\n\n</think>\n\nso<|im_end|>"]),
        (LABELS, ["yes\n", "so\n"]),
    ],
    ids=["headers", "instructions", "marked", "thoughts", "labels"],
)
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_each_assistant_turn_is_learned_with_what_ends_it(tokenize_with, learned, template, expected, system):
    assert learned(tokenize_with(chat("really?", "yes", "why?", "so", system=system), template)) == expected


def test_chatml_teaches_the_end_of_turn_but_not_the_line_break_after_it(tokenize_with, learned, read_ids):
    tokens = tokenize_with(chat("really?", "yes", "why?", "so", system="Be brief."))
    assert read_ids(tokens.ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nreally?<|im_end|>\n<|im_start|>assistant\nyes"
        "<|im_end|>\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\nso<|im_end|>\n"
    )
    assert learned(tokens) == ["yes<|im_end|>", "so<|im_end|>"]


def test_the_text_is_what_the_tokenizer_itself_renders(tokenize_with, make_tokenizer, read_ids):
    from transformers import AutoTokenizer

    conversation = chat("really?", " yes ", "why?", "so\n", system="Be brief.")
    for template in (HEADERS, INSTRUCTIONS, THOUGHTS, LABELS, MARKED):
        tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(template))
        expected = tokenizer.apply_chat_template(conversation.messages, return_dict=True)["input_ids"]
        assert tokenize_with(conversation, template).ids.tolist() == expected


def test_only_the_answer_after_the_prompt_is_learned(tokenize_with, learned):
    for template in (HEADERS, MARKED):
        assert learned(tokenize_with(chat("a", "b", "c", "d", prompt=3), template)) == ["d<|eot|>"]


def test_the_same_word_in_the_question_is_not_learned(tokenize_with, learned):
    assert learned(tokenize_with(chat("yes", "yes"), HEADERS)) == ["yes<|eot|>"]


def test_characters_of_several_tokens_are_learned_whole(tokenize_with, learned):
    assert learned(tokenize_with(chat("naïve 😀?", "😀 ça va", "x", "é"), HEADERS)) == ["😀 ça va<|eot|>", "é<|eot|>"]


def test_train_on_all_learns_all_but_the_first_token(tokenize_with, read_ids):
    tokens = tokenize_with(chat("a", "b"), HEADERS, train_on="all")
    assert not tokens.loss[0]
    assert tokens.loss[1:].all()


def test_a_template_that_does_not_tell_the_turns_is_an_error_that_says_what_to_do(tokenize_with):
    with pytest.raises(DataError, match=r"(?s)does not show which tokens.*\{% generation %\}.*train_on: all"):
        tokenize_with(chat("a", "b"), UNMARKED)


def test_marks_that_leave_out_a_turn_are_an_error(tokenize_with):
    only_first = MARKED.replace("message['role'] == 'assistant'", "loop.index0 == 1")
    with pytest.raises(DataError, match=r"marks 1 assistant turns .* that has 2"):
        tokenize_with(chat("a", "b", "c", "d"), only_first)


def test_what_the_template_refuses_is_a_bad_row(tokenize_with):
    refuses = "{{ raise_exception('System prompts are not supported') }}"
    with pytest.raises(RowError, match="is refused by the model's chat template: 'System prompts are not supported'"):
        tokenize_with(chat("a", "b"), refuses)


def test_a_template_that_is_not_jinja_is_an_error_with_its_line(tokenize_with):
    with pytest.raises(DataError, match=r"not a Jinja template.* in line 2"):
        tokenize_with(chat("a", "b"), "first\n{% for %}")


@pytest.mark.parametrize("template", [None, {"rag": "{{ messages }}", "tool_use": "{{ messages }}"}])
def test_a_missing_template_is_an_error_that_says_how_to_give_one(tokenize_with, template):
    with pytest.raises(DataError, match=r"(?s)has no chat template.*chat_template: chatml\.jinja"):
        tokenize_with(chat("a", "b"), template)


def test_of_several_templates_the_default_one_is_taken(tokenize_with):
    templates = {"default": CHATML, "rag": "{{ messages }}"}
    assert tokenize_with(chat("a", "b"), templates).ids.tolist() == tokenize_with(chat("a", "b")).ids.tolist()


def test_plain_text_needs_no_template_and_ends_with_the_end_of_text_token(tokenize_with, learned, read_ids):
    tokens = tokenize_with(PlainText("", "Once upon a time"), None)
    assert read_ids(tokens.ids) == "Once upon a time</s>"
    assert learned(tokens) == ["nce upon a time</s>"]


def test_of_prompt_and_completion_the_completion_is_learned(tokenize_with, learned, read_ids):
    tokens = tokenize_with(PlainText("1 + 1 =", " 2"), None)
    assert read_ids(tokens.ids) == "1 + 1 = 2</s>"
    assert learned(tokens) == [" 2</s>"]


def test_plain_text_begins_as_the_tokenizer_begins_a_text(tokenize_with, learned, read_ids):
    tokens = tokenize_with(PlainText("", "Once"), None, begins_texts=True)
    assert read_ids(tokens.ids) == "<s>Once</s>"
    assert learned(tokens) == ["Once</s>"]


def test_a_conversation_gets_no_special_tokens_but_the_templates_own(tokenize_with, read_ids):
    tokens = tokenize_with(chat("a", "b"), INSTRUCTIONS, begins_texts=True)
    assert read_ids(tokens.ids) == "<s>[INST] a [/INST] b</s>"


def test_a_token_across_the_border_of_prompt_and_completion_is_learned(tokenize_with):
    tokens = tokenize_with(PlainText("ab", "cd"), None, merges=[("b", "c")])
    assert tokens.loss.tolist() == [False, True, True, True]  # a, bc, d, </s>


TOOLS = (  # as Qwen3 does it: thoughts of earlier questions are dropped, answers of tools stand in a user's turn
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% set last = namespace(question=0) %}"
    "{% for message in messages if message.role == 'user' %}"
    "{% set last.question = messages.index(message) %}{% endfor %}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>{{ message.content }}</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content and loop.index0 > last.question %}"
    "<think>{{ message.reasoning_content }}</think>\n{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USING_TOOLS = [
    {"role": "user", "content": "What is 1 + 2?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I add.",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}],
    },
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]
DEFINITION = {"type": "function", "function": {"name": "add"}}


def learned(rendered):
    return [rendered.text[begin:end] for begin, end in rendered.spans]


def test_calls_and_thoughts_are_learned_and_what_tools_say_is_not():
    template = ChatTemplate(TOOLS, {}, ["<|im_end|>"], "the template")
    rendered = template.render(Conversation(USING_TOOLS, tools=(DEFINITION,)))
    assert learned(rendered) == [
        '<think>I add.</think>\n<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|im_end|>',
        "It is 3.<|im_end|>",
    ]
    assert '{"type": "function", "function": {"name": "add"}}' in rendered.text
    assert template.ends_turns(rendered)


def test_thoughts_that_the_template_drops_from_earlier_turns_are_not_learned():
    template = ChatTemplate(TOOLS, {}, ["<|im_end|>"], "the template")
    later = [*USING_TOOLS, {"role": "user", "content": "And 2 + 2?"}, {"role": "assistant", "content": "4"}]
    rendered = template.render(Conversation(later))
    assert "I add." not in rendered.text
    assert learned(rendered)[0] == ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|im_end|>')
    assert learned(rendered)[-1] == "4<|im_end|>"


@pytest.mark.parametrize(
    ("conversation", "part"),
    [
        (Conversation([USING_TOOLS[0], {**USING_TOOLS[3], "thinking": "Hm."}]), "thinking"),
        (Conversation(USING_TOOLS), "reasoning_content`, `tool`, `tool_calls"),
        (Conversation([USING_TOOLS[0], USING_TOOLS[3]], tools=(DEFINITION,)), "tools"),
    ],
)
def test_what_a_template_would_leave_out_in_silence_is_a_bad_row(conversation, part):
    template = ChatTemplate(LABELS, {}, [], "the model's chat template")
    with pytest.raises(RowError, match=f"has `{part}`, which the model's chat template does not render"):
        template.render(conversation)
    with pytest.raises(RowError, match="does not render"):
        template.render_text(conversation)


def test_a_turn_that_the_row_leaves_out_is_context(tokenize_with, learned):
    turns = [("user", "a"), ("assistant", "wrong"), ("user", "b"), ("assistant", "right")]
    messages = [{"role": role, "content": content} for role, content in turns]
    tokens = tokenize_with(Conversation(messages, unlearned=frozenset({1})))
    assert learned(tokens) == ["right<|im_end|>"]
    with pytest.raises(RowError, match="`train_on: all` learns everything"):
        tokenize_with(Conversation(messages, unlearned=frozenset({1})), train_on="all")


def template_of(source):
    return ChatTemplate(source, {"eos_token": "</s>"}, ["<|im_end|>", "<|end|>", "</s>"], "the model's chat template")


SAYS = "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHAT = chat("ask1", "say1", "ask2", "say2")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (  # the roles are swapped
            "{% for message in messages %}{% set role = 'user' if message.role == 'assistant' else 'assistant' %}"
            "{{ '<|im_start|>' + role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}" + ASKS,
            r"the model's chat template does not show which tokens the assistant says",
        ),
        (  # one mark from the first word to the last
            "{% for message in messages %}{% generation %}" + SAYS + "{% endgeneration %}{% endfor %}",
            r"the model's chat template marks 1 assistant turns .* that has 2",
        ),
        (  # marks around the wrong messages
            "{% for message in messages %}{% if message.role == 'user' %}{% generation %}"
            + SAYS
            + "{% endgeneration %}{% else %}"
            + SAYS
            + "{% endif %}{% endfor %}",
            r"mask of the model's chat template is wrong in quser1, qassistant2, quser3, qassistant4",
        ),
        (  # the question again behind the answer
            "{% for message in messages %}"
            + SAYS
            + "{% if loop.last and message.role == 'assistant' %}{{ messages[-2].content }}{% endif %}{% endfor %}"
            + ASKS,
            r"mask of the model's chat template is wrong in quser1, quser3",
        ),
    ],
    ids=["swapped", "all marked", "wrong marks", "question repeated"],
)
def test_a_template_whose_mask_cannot_be_proved_is_refused_by_name(source, reason):
    with pytest.raises(DataError, match=reason):
        template_of(source).documents(CHAT)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": True}}}
CALLING = Conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}])


@pytest.mark.parametrize(
    "call",
    [
        "{{ call.function.name + '(' + call.function.arguments + ')' }}",
        "{{ call.function.name }}({{ call.function.arguments }})",
        "{{ call.function.name }}({{ call.function.arguments | tojson }})",
        "{% if message.content is none %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endif %}",
    ],
    ids=["joined", "printed", "dumped", "only without text"],
)
def test_arguments_of_calls_are_given_as_the_template_takes_them(call):
    source = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{{ message.content or '' }}"
        "{% for call in message.tool_calls or [] %}" + call + "{% endfor %}<|im_end|>\n{% endfor %}" + ASKS
    )
    (document,) = template_of(source).documents(CALLING)
    assert learned(document) == ['add({"a": true})<|im_end|>']


@pytest.mark.parametrize(
    ("calls", "message", "part"),
    [
        ("{{ message.tool_calls[0].function | tojson }}", {"tool_calls": [CALL, CALL]}, "tool call 2"),
        ("{{ message.tool_calls | tojson }}", {"content": "I add.", "tool_calls": [CALL]}, "content"),
        ("{{ message.content or message.tool_calls | tojson }}", {"content": "x", "tool_calls": [CALL]}, "tool call 1"),
    ],
    ids=["second call", "text beside a call", "call beside text"],
)
def test_what_a_template_leaves_out_of_a_turn_is_a_bad_row(calls, message, part):
    source = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
        "{% if message.tool_calls %}"
        + calls
        + "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
        + ASKS
    )
    turn = {"role": "assistant", "content": ""} | message
    with pytest.raises(RowError, match=rf"has `{part}` in message 2, which the model's chat template leaves out"):
        template_of(source).documents(Conversation([{"role": "user", "content": "a"}, turn]))


ROLES_SWAPPED = (
    "{% for message in messages %}{{ '<|im_start|>' + ('user' if message.role == 'assistant' else 'assistant') }}"
    "{{ '\n' + message.content + '<|im_end|>\n' }}{% endfor %}" + ASKS
)
CONTENTS_SWAPPED = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{{ messages[loop.index0 - 1].content + '<|im_end|>\n' }}{% endfor %}" + ASKS
)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        (ROLES_SWAPPED, "does not show which tokens the assistant says"),
        (CONTENTS_SWAPPED, "does not show which tokens the assistant says"),
        ("{% for message in messages | reverse %}" + SAYS + "{% endfor %}" + ASKS, "does not show which tokens"),
        (
            "{% for message in messages if message.role != 'user' %}" + SAYS + "{% endfor %}" + ASKS,
            "leaves out what `user` says in message 1, or its end",
        ),
        (
            MARKED.replace("message['role'] == 'assistant'", "message['role'] == 'user'"),
            "is wrong in quser1, qassistant2",
        ),
    ],
    ids=["swaps roles", "swaps contents", "turns the order round", "drops questions", "marks questions"],
)
def test_a_template_that_changes_who_says_what_is_refused(source, cause):
    with pytest.raises(DataError, match=cause):
        template_of(source).documents(CHAT)


def cut(role):
    """Return a chat template that writes only the first 12 characters of a role's messages."""
    content = f"(message.content[:12] if message.role == '{role}' else message.content)"
    return "{% for message in messages %}" + SAYS.replace("message.content", content)


@pytest.mark.parametrize(
    ("source", "role", "number"),
    [
        ("{% for message in messages if message.role != 'system' %}" + SAYS, "system", 1),
        (cut("user"), "user", 2),
        (cut("assistant"), "assistant", 3),
    ],
    ids=["system prompt", "end of a question", "end of an answer"],
)
def test_what_a_template_leaves_out_of_a_conversation_is_a_bad_row(source, role, number):
    template = template_of(source + "{% endfor %}" + ASKS)
    row = chat("a long question", "a long answer", system="Be brief.")
    with pytest.raises(RowError, match=f"leaves out what `{role}` says in message {number}, or its end"):
        template.render_text(row)
    with pytest.raises(RowError, match=f"message {number}.* leaves out|leaves out .* in message {number}"):
        template.documents(row)


def test_a_system_prompt_is_not_taken_for_shown_because_a_question_repeats_it():
    row = chat("Be brief. Who?", "Ann", system="Be brief.")
    dropping = template_of("{% for message in messages if message.role != 'system' %}" + SAYS + "{% endfor %}" + ASKS)
    with pytest.raises(RowError, match="leaves out what `system` says in message 1"):
        dropping.documents(row)
    assert "Be brief." in template_of("{% for message in messages %}" + SAYS + "{% endfor %}" + ASKS).render_text(row)


def test_a_document_a_turn_where_the_template_ends_the_last_one_otherwise():
    source = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
        "{{ '</s>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endfor %}" + ASKS
    )
    documents = template_of(source).documents(CHAT)
    assert [learned(document) for document in documents] == [["say1</s>"], ["say2</s>"]]
    with pytest.raises(RowError, match="has earlier turns after the prompt"):
        template_of(source).render(CHAT)
    assert learned(template_of(source).render(chat("ask1", "say1", "ask2", "say2", prompt=3))) == ["say2</s>"]


def test_thoughts_of_earlier_turns_are_counted_or_learned_each_in_a_document_of_its_own():
    conversation = Conversation(
        [*USING_TOOLS, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "4"}]
    )
    template = ChatTemplate(TOOLS, {}, ["<|im_end|>"], "the template")
    (document,) = template.documents(conversation)
    assert "I add." not in document.text
    assert template.num_dropped_thoughts == 1
    first, last = template.documents(conversation, "separately")
    assert learned(first)[0].startswith("<think>I add.</think>")
    assert learned(first)[1:] + learned(last) == ["It is 3.<|im_end|>", "4<|im_end|>"]
    assert template.num_dropped_thoughts == 1


def test_no_turn_to_learn_is_a_document_without_loss():
    (document,) = template_of("{% for message in messages %}" + SAYS + "{% endfor %}" + ASKS).documents(
        Conversation(CHAT.messages, unlearned=frozenset({1, 3}))
    )
    assert document.spans == ()
    assert "say2" in document.text
