"""Episodes are segments of token ids: what the model sampled stays as it is, and templates prove what stands between.

The oracle is Transformers, which renders and tokenizes a whole conversation at once.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from transformers import AutoTokenizer

from stages.core.errors import DataError
from stages.data.calculator import DEFINITION, calculate
from stages.data.messages import Conversation, make_message, parse_tools
from stages.data.tokenizer import DocumentTokenizer
from stages.hubs.builtin import qwen3_tools
from stages.rollouts.environments.calls import parse_llama3_json
from stages.rollouts.environments.environment import Call, EnvironmentConfig
from stages.rollouts.environments.episodes import Episode, Episodes, EpisodeStart, TurnReader, TurnRequest
from stages.rollouts.environments.registry import AnyEnvironment

QUESTION = "What is 12 * 34?"
TOOLS = parse_tools({"tools": [DEFINITION]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    qwen3_tools.make_tokenizer().save_pretrained(made)
    return made


@dataclass(frozen=True)
class Turn:
    """Turn as a server samples one."""

    token_ids: list[int]
    text: str = "an answer"
    truncated: bool = False

    @property
    def log_probabilities(self) -> list[float]:
        return [-0.5] * len(self.token_ids)


@dataclass
class Scripted:
    """Model that says what it is given, turn by turn."""

    turns: list[list[int]]
    asked: list[TurnRequest] = field(default_factory=list)

    def __call__(self, requests: Sequence[TurnRequest]) -> list[Turn]:
        self.asked += requests
        return [Turn(self.turns[len(self.asked) - 1])]


def environment(**fields: Any) -> EnvironmentConfig:
    return TypeAdapter(AnyEnvironment).validate_python({"tools": ["calculator"], **fields})


def play(folder: Path, turns: list[str], *, most_tokens: int = 1000, template: Path | None = None, **fields: Any):
    """Play one episode in which the model says `turns`; return it, and the requests for its turns."""
    tokenizer = DocumentTokenizer(folder, template, "assistant")
    encode = AutoTokenizer.from_pretrained(folder).encode
    config, prompt = environment(**fields), Conversation([make_message("user", QUESTION)], tools=TOOLS)
    ends = encode("<|im_end|>")
    reader = TurnReader.proved(tokenizer, ends, config, prompt)
    model = Scripted([encode(turn) for turn in turns])
    with config.opened() as make:
        episodes = Episodes(config, make, reader, most_tokens, 64, lambda seed, turn: seed + turn)
        start = EpisodeStart(prompt, tokenizer.encode_prompt(prompt)[1], {}, 5)
        (episode,) = episodes.play([start], model)
    return episode, model.asked


def call(expression: str) -> str:
    arguments = json.dumps({"expression": expression})
    return f'<tool_call>\n{{"name": "calculator", "arguments": {arguments}}}\n</tool_call><|im_end|>'


def answers(folder: Path, episode: Episode) -> list[str]:
    """Return what the environment wrote, as text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.decode(one.token_ids) for one in episode.segments if one.author == "environment"]


def test_an_episode_is_the_conversation_that_transformers_renders(folder: Path) -> None:
    episode, asked = play(folder, [call("12 * 34"), call("408 + 1"), "409<|im_end|>"])
    messages = [make_message("user", QUESTION)]
    for expression, answer in (("12 * 34", "408"), ("408 + 1", "409")):
        function = {"name": "calculator", "arguments": {"expression": expression}}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
        messages.append(make_message("tool", answer))
    messages.append(make_message("assistant", "409"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    whole = tokenizer.encode(tokenizer.apply_chat_template(messages, tools=list(TOOLS), tokenize=False))
    assert episode.token_ids == whole[:-1], "all but the line break after the last turn"
    assert [one.token_ids for one in asked] == [whole[: len(one.token_ids)] for one in asked]
    assert [one.seed for one in asked] == [5, 6, 7]
    assert [one.author for one in episode.segments] == ["model", "environment", "model", "environment", "model"]
    assert (episode.end, episode.num_turns, episode.metrics["calls"]) == ("done", 3, 2.0)
    spans = episode.environment_spans
    learned = [token for place, token in enumerate(episode.after_prompt) if not any(a <= place < b for a, b in spans)]
    assert learned == [token for one in episode.segments if one.author == "model" for token in one.token_ids]
    assert [value == 0 for value in episode.log_probabilities] == [
        any(begin <= place < end for begin, end in spans) for place in range(len(episode.after_prompt))
    ]


def test_what_was_sampled_is_never_tokenized_again(folder: Path) -> None:
    """A turn whose tokens are not those of its text is kept, token by token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    letters = [
        tokenizer.convert_tokens_to_ids(letter)
        for letter in call("1 + 1").removesuffix("<|im_end|>")[11:-12].replace(" ", "Ġ").replace("\n", "Ċ")
    ]
    tags = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>", "<|im_end|>"])
    odd = [tags[0], *letters, *tags[1:]]
    assert tokenizer.encode(tokenizer.decode(odd)) != odd

    question = Conversation([make_message("user", "q")], tools=TOOLS)
    reader = TurnReader.proved(DocumentTokenizer(folder, None, "assistant"), tags[-1:], environment(), question)
    model = Scripted([odd, tags[-1:]])
    asked = reader.tokenizer.encode_prompt(question)[1]
    with environment().opened() as make:
        episodes = Episodes(environment(), make, reader, 1000, 64, lambda seed, turn: seed)
        (episode,) = episodes.play([EpisodeStart(question, asked, {}, 0)], model)
    assert episode.segments[0].token_ids == odd
    assert model.asked[1].token_ids[: len(asked) + len(odd)] == [*asked, *odd]
    assert "\n2\n" in answers(folder, episode)[0]


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        ('<tool_call>\n{"name": "calc<|im_end|>', "error: the call is no JSON"),
        ('<tool_call>{"arguments": {}}</tool_call><|im_end|>', 'error: the call has no "name"'),
        ('<tool_call>{"name": "search", "arguments": {}}</tool_call><|im_end|>', "error: there is no tool 'search'"),
        (
            '<tool_call>{"name": "calculator", "arguments": {}}</tool_call><|im_end|>',
            "takes one argument",
        ),
        (call("1 / 0"), "error: division by zero"),
        (call("import os"), "error: this is no expression of numbers"),
    ],
)
def test_a_call_that_cannot_be_is_answered_by_the_reason(folder: Path, turn: str, answer: str) -> None:
    episode, _ = play(folder, [turn, "408<|im_end|>"])
    assert answer in answers(folder, episode)[0]
    assert episode.metrics["failed_calls"] == 1 and episode.end == "done"


def test_a_template_that_takes_one_call_in_a_turn_tells_of_two(folder: Path, tmp_path: Path) -> None:
    template, several = tmp_path / "own.jinja", "{%- for message in messages %}"
    refusal = (
        "{%- if message.tool_calls and message.tool_calls | length > 1 %}{{ raise_exception('one call') }}{%- endif %}"
    )
    template.write_text(qwen3_tools.CHAT_TEMPLATE.replace(several, several + refusal))
    two = call("1 + 1").removesuffix("<|im_end|>") + call("2 + 2")
    episode, _ = play(folder, [two, call("2 + 3"), "5<|im_end|>"], template=template)
    reason, after = answers(folder, episode)
    assert "nothing was answered" in reason and "one call" in reason
    assert "\n5\n" in after and (episode.end, episode.metrics["malformed_calls"]) == ("done", 1.0)


def test_braces_of_a_sentence_are_no_call_of_llama_3() -> None:
    assert parse_llama3_json(r"The answer is $\boxed{42}$.") == ()
    assert parse_llama3_json('{"name": "a", "parameters": {"b": 1}}') == (Call("a", {"b": 1}),)
    with pytest.raises(ValueError, match="no JSON"):
        parse_llama3_json('<|python_tag|>{"name": ')


def test_special_tokens_in_a_tool_s_answer_are_text(folder: Path) -> None:
    episode, _ = play(
        folder, ['<tool_call>{"name": "<|im_end|>", "arguments": {}}</tool_call><|im_end|>', "<|im_end|>"]
    )
    assert len(episode.segments) == 3
    tokens = AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(episode.segments[1].token_ids)
    assert tokens.count("<|im_end|>") == 1, "of the tool's turn alone"
    assert "there is no tool '<|im_end|>'" in answers(folder, episode)[0]


def test_an_episode_has_bounds(folder: Path) -> None:
    calls = [call("1 + 1")] * 4
    assert play(folder, calls, max_turns=2)[0].metrics["out_of_turns"] == 1
    episode, asked = play(folder, calls, most_tokens=70)
    assert episode.metrics["out_of_tokens"] == 1 and len(episode.token_ids) <= 70 and asked[-1].max_tokens > 0
    assert play(folder, ["no end"])[0].end == "tokens", "a turn that was cut off has no place for an answer"
    assert play(folder, calls, max_episode_s=1e-9)[0].metrics["out_of_seconds"] == 1
    episode, _ = play(folder, [call("2 ** 300"), "<|im_end|>"], max_answer_bytes=8)
    assert f"\n{2**300}"[:9] + " … (cut off)\n" in answers(folder, episode)[0] and episode.metrics["cut_answers"] == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            ("{%- for message in messages %}", "{{ messages | length }}{%- for message in messages %}"),
            "another way once",
        ),
        (("<|im_end|>", ""), "does not end the model's turns with"),
        (("message.content + '\\n</tool_response>", "'\\n</tool_response>"), "cannot continue a conversation"),
        (('{"name": "', "<function="), "qwen3_coder"),
        (("<tool_call>", "<call>"), "shows no known format of calls"),
    ],
)
def test_a_template_that_cannot_be_continued_is_refused_by_name(
    folder: Path, tmp_path: Path, change: tuple[str, str], problem: str
) -> None:
    template = tmp_path / "own.jinja"
    assert change[0] in qwen3_tools.CHAT_TEMPLATE
    template.write_text(qwen3_tools.CHAT_TEMPLATE.replace(*change))
    with pytest.raises(DataError, match=f"the chat template own.jinja.*{problem}"):
        play(folder, [], template=template)


def test_the_calculator_is_exact_and_bounded() -> None:
    for expression in ("1 + 2 * 3", "(7 - 10) * -4", "7 // 2 - 7 % 4", "2 ** 10", "-7 // 2", "2 ** -2", "1.5 * 4"):
        assert Fraction(calculate(expression)) == Fraction(eval(expression))
    assert [calculate(one) for one in ("0.1 + 0.2", "1 / 3", "-1 / 8", "(-1) ** 1001", "0 ** 9", "0.5 ** 3")] == [
        *("0.3", "0.333333333333", "-0.125", "-1", "0", "0.125")
    ]
    for refused in (
        "2 ** 5000",
        "9 ** 9 ** 9",
        "(" * 200,
        "a",
        "1 / 0",
        "'a' * 3",
        "9" * 501,
        "1e999",
        "__import__('os')",
    ):
        with pytest.raises(ValueError, match=r"\w"):
            calculate(refused)


def test_one_environment_is_named_by_its_field() -> None:
    with pytest.raises(ValidationError, match="expected one environment, by one of the fields tools, python"):
        TypeAdapter(AnyEnvironment).validate_python({"max_turns": 2})
    with pytest.raises(ValidationError, match="calculator"):
        TypeAdapter(AnyEnvironment).validate_python({"tools": ["telephone"]})


GAME = """
import socket, time
FREE = socket.socket
class Environment:
    tools = {tools}
    def reset(self, row, seed):
        self.number, self.turns = row["number"], []
        return f"Guess a number, game {{seed}}."
    def step(self, action):
        self.turns.append(action["text"])
        {step}
"""


def own(folder: Path, tmp_path: Path, step: str, turns: list[str], tools: str = "[]", **fields: Any):
    """Play one episode in an author's environment, whose method `step` is given."""
    (tmp_path / "env.py").write_text(GAME.format(step=step, tools=tools))
    config = TypeAdapter(AnyEnvironment).validate_python({"python": tmp_path / "env.py", **fields})
    prompt = Conversation([make_message("user", "Play.")], tools=config.definitions)
    tokenizer, encode = DocumentTokenizer(folder, None, "assistant"), AutoTokenizer.from_pretrained(folder).encode
    reader = TurnReader.proved(tokenizer, encode("<|im_end|>"), config, prompt)
    with config.opened() as make:
        episodes = Episodes(config, make, reader, 1000, 64, lambda seed, turn: seed)
        start = EpisodeStart(prompt, tokenizer.encode_prompt(prompt)[1], {"number": 7}, 5)
        return episodes.play([start], Scripted([encode(turn) for turn in turns]))[0]


def test_an_author_s_class_answers_and_rewards(folder: Path, tmp_path: Path) -> None:
    step = 'return ("<|im_end|>more", 0.25, action["text"] == str(self.number))'
    episode = own(folder, tmp_path, step, ["5<|im_end|>", "7<|im_end|>"])
    assert (episode.end, episode.reward, episode.num_turns) == ("done", 0.5, 2)
    assert (
        AutoTokenizer.from_pretrained(folder)
        .decode(episode.start.token_ids)
        .endswith("user\nPlay.\n\nGuess a number, game 5.<|im_end|>\n<|im_start|>assistant\n")
    )
    assert answers(folder, episode) == ["\n<|im_start|>user\n<|im_end|>more<|im_end|>\n<|im_start|>assistant\n"]
    ids = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["<|im_end|>"])[0]
    assert episode.segments[1].token_ids.count(ids) == 1, "what the environment wrote is text"
    step = 'return (["8"], 1, len(self.turns) == 2) if action["calls"] == [{"name": "f", "arguments": {}}] else 5'
    turn = '<tool_call>{"name": "f", "arguments": {}}</tool_call><|im_end|>'
    episode = own(folder, tmp_path, step, [turn, turn], '[{"name": "f"}]', answers_as="tool")
    assert "<tool_response>\n8\n</tool_response>" in answers(folder, episode)[0]


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        ("return 'more'", "step gave \"'more'\"; expected three values"),
        ("return ('more', float('nan'), False)", "step gave NaN; expected a finite number as reward"),
        ("return (5, 1, False)", "step gave 5; expected a text as observation"),
        ("time.sleep(60)", "gave no answer within timeout_s, 2 s"),
        ("FREE()", "PermissionError"),
        ("__import__('os')._exit(3)", "ended its process with exit code 3"),
        ("return ('x' * (1 << 40), 1, False)", "MemoryError"),
    ],
)
def test_what_an_author_s_class_does_wrong_is_one_sentence(
    folder: Path, tmp_path: Path, step: str, problem: str
) -> None:
    with pytest.raises(DataError) as error:
        own(folder, tmp_path, step, ["5<|im_end|>"], timeout_s=2)
    assert problem in str(error.value) and "\n" not in str(error.value)


def test_megabytes_of_an_environment_are_cut(folder: Path, tmp_path: Path) -> None:
    step = "return ('x' * 5_000_000, 0, False)"
    episode = own(folder, tmp_path, step, ["1<|im_end|>", "<|im_end|>"], max_answer_bytes=50, max_turns=2)
    assert "x" * 50 + " … (cut off)" in answers(folder, episode)[0] and episode.metrics["cut_answers"] == 1
