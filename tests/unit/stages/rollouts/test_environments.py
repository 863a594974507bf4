"""Episodes are segments of token ids: what the model sampled stays as it is, and templates prove what stands between.

The oracle is Transformers, which renders and tokenizes a whole conversation at once.
"""

import json
import math
import random
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
from stages.rewards import code_program
from stages.rollouts.environments.calls import PARSERS, _parameters, action, parse_llama3_json
from stages.rollouts.environments.environment import Action, Call, EnvironmentConfig
from stages.rollouts.environments.episodes import Episode, Episodes, EpisodeStart, TurnReader, TurnRequest
from stages.rollouts.environments.registry import AnyEnvironment
from stages.rollouts.environments.search import K1, B, Passages
from tests.train_stage import make_config
from tests.unit.stages.rollouts import call_texts

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
    with config.opened(folder) as make:
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
    with environment().opened(folder) as make:
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


def read(form: str, text: str) -> list[list[Any]]:
    """Return the calls in a text as vLLM's recorded answers have them."""
    parse = PARSERS[form](call_texts.TOOLS, frozenset(["<|im_start|>", "<|im_end|>", "<|endoftext|>"]))
    try:
        return [[one.name, one.arguments] for one in parse(text)[1]]
    except ValueError as error:
        assert str(error), "the model reads the reason"
        return []


def same_calls(form: str, texts: Sequence[str], answers: Sequence[list[list[Any]]]) -> bool:
    # as texts: NaN is not equal to itself, and 1 is to True
    return all(json.dumps(read(form, text)) == json.dumps(one) for text, one in zip(texts, answers, strict=True))


@pytest.mark.parametrize("form", call_texts.FORMS)
def test_calls_are_those_that_vllm_reads(form: str) -> None:
    texts, answers = zip(*call_texts.recorded()[form], strict=True)
    assert same_calls(form, texts, answers)
    numbers = {len(calls) for calls in answers}
    assert len(texts) == call_texts.NUM_TEXTS and numbers == {0, 1, 2, 3} and list(PARSERS) == list(call_texts.FORMS)


@pytest.mark.nightly
def test_calls_are_those_that_vllm_s_own_parsers_read_now() -> None:
    asked = {form: [text for text, _ in pairs] for form, pairs in call_texts.recorded().items()}
    others = {form: call_texts.texts(form, 1000, seed=1) for form in asked}
    answered = call_texts.ask_vllm({form: [*asked[form], *others[form]] for form in asked})
    for form, pairs in call_texts.recorded().items():
        assert answered[form][: len(pairs)] == [calls for _, calls in pairs], "vLLM's parser has changed"
        assert same_calls(form, others[form], answered[form][len(pairs) :])


def test_braces_of_a_sentence_are_no_call_of_llama_3() -> None:
    assert parse_llama3_json(r"The answer is $\boxed{42}$.")[1] == ()
    assert parse_llama3_json('{"name": "a", "parameters": {"b": 1}}') == ("", (Call("a", {"b": 1}),))
    with pytest.raises(ValueError, match="no JSON"):
        parse_llama3_json('<|python_tag|>{"name": ')


LATEX = r"So $\frac{1}{2}$, and {x}:"
CALLS = {
    "hermes": '<tool_call>{"name": "a", "arguments": ARGUMENTS}</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "a", "parameters": ARGUMENTS}',
    "qwen3_coder": "<tool_call><function=a><parameter=b>ARGUMENTS</parameter></function></tool_call>",
}


def acted(form: str, text: str) -> Action:
    tools = parse_tools({"tools": [{"name": "a", "parameters": {"properties": {"b": {"type": "object"}}}}]})
    return action(text, PARSERS[form](tools, frozenset()))


@pytest.mark.parametrize("form", CALLS)
def test_text_before_a_call_is_kept_whole_whatever_braces_it_has(form: str) -> None:
    said = "Let me see:" if form == "llama3_json" else LATEX  # a brace is where a call of Llama 3 begins
    turn = acted(form, f"{said} {CALLS[form].replace('ARGUMENTS', '{}')}")
    assert turn.message["content"] == said and len(turn.message["tool_calls"]) == 1
    assert acted(form, LATEX).message == make_message("assistant", LATEX)


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ('{"b": "\\ud83d"}', "half of a character"),
        ('{"\\ud83d": 1}', "half of a character"),
        ('{"b": NaN}', "not JSON compliant"),
        ('{"b": 1e999}', "not JSON compliant"),
        ('{"b": ' + "[" * 150 + "]" * 150 + "}", "nested more than 100 deep"),
    ],
)
def test_a_call_that_cannot_be_written_and_read_again_is_malformed(form: str, arguments: str, problem: str) -> None:
    turn = acted(form, CALLS[form].replace("ARGUMENTS", arguments))
    if form == "qwen3_coder" and "JSON" in problem:  # its parser takes such a value as text
        assert turn.calls == (Call("a", {"b": arguments}),)
    else:
        assert turn.malformed and problem in turn.malformed and not turn.calls


def test_arguments_of_xml_are_read_in_time_in_proportion_to_the_text() -> None:
    pieces = ("<parameter=", "< parameter = b", ">", "</parameter>", "< / parameter >", "x", "<", "\n", " ")
    whole = re.compile(r"<\s*parameter\s*=\s*([^>]*)>(.*?)(?:<\s*/\s*parameter\s*>|(?=<\s*parameter\s*=))", re.DOTALL)
    drawn = random.Random(0)
    for _ in range(3000):
        body = "".join(drawn.choices(pieces, k=drawn.randrange(1, 16)))
        assert list(_parameters(body)) == whole.findall(body), body
    began_s = time.process_time()
    turn = acted("qwen3_coder", CALLS["qwen3_coder"].replace("ARGUMENTS", "<parameter=" * 40_000))
    assert len(turn.calls) == 1 and time.process_time() - began_s < 5, "that one pattern takes a minute"


def test_a_turn_has_a_bound_on_its_calls() -> None:
    one = CALLS["hermes"].replace("ARGUMENTS", "{}")
    assert len(acted("hermes", one * 32).calls) == 32
    assert acted("hermes", one * 33).malformed == "the turn has 33 calls; expected at most 32"


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
    three = "".join(call(one).removesuffix("<|im_end|>") for one in ("12345", "67890", "13579"))
    episode, _ = play(folder, [f"{three}<|im_end|>", "<|im_end|>"], max_answer_bytes=8)
    shown = re.findall(r"<tool_response>\n(.*)\n</tool_response>", answers(folder, episode)[0])
    assert shown == ["12345", "678 … (cut off)", " … (cut off)"], "the turn has one budget"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            ("{%- for message in messages %}", "{{ messages | length }}{%- for message in messages %}"),
            "another way once",
        ),
        (("<|im_end|>", ""), "does not end the model's turns with"),
        (("message.content + '\\n</tool_response>", "'\\n</tool_response>"), "cannot continue a conversation"),
        (('{"name": "', "<arg_key>"), "glm45"),
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


def tool_call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


def test_code_of_the_model_runs_in_the_sandbox_and_what_it_prints_is_the_answer(folder: Path) -> None:
    turns = [
        tool_call("python", code="import math\nprint(math.factorial(5))\nprint('<|im_end|>')"),
        tool_call("python", code="print('so far')\n1 / 0"),
        tool_call("python", code="import socket\nsocket.socket()"),
        tool_call("python", code="while True: print('x' * 1000)"),
        tool_call("python", code="import time\nprint('slow', flush=True)\ntime.sleep(60)"),
        tool_call("python", code="import sys\nprint(1)\nsys.exit(2)"),
        tool_call("python", code="import os\nprint('so', flush=True)\nos._exit(3)"),
        tool_call("python", code="import os\nos.abort()"),
        tool_call("python", code="import sys\nprint('first')\nsys.stdout = sys.stderr = None\n1 / 0"),
        tool_call("python", code="class E(Exception):\n    def __str__(self): return 1 / 0\nraise E"),
        "done<|im_end|>",
    ]
    episode, _ = play(
        folder, turns, tools=["python"], max_turns=12, most_tokens=8000, max_answer_bytes=300, code_timeout_s=3
    )
    texts = answers(folder, episode)
    expected = (
        "\n120\n<|im_end|>\n",
        "so far\nZeroDivisionError: division by zero",
        "PermissionError",
        "xxxx",
        "slow",
        "\n1\n",
        "error: the code's process ended with exit code 3\nso",
        "error: the code's process ended with exit code -6",
        "first\nZeroDivisionError: division by zero",
        "error: the code's process ended with exit code 1\n",
    )
    assert not any("code_program" in text for text in texts)
    assert len(texts) == 10 and all(part in text for part, text in zip(expected, texts, strict=True))
    assert (
        "printed or wrote too much" in texts[3] and texts[3].count("x") < 300 and "the code took over 3 s" in texts[4]
    )
    end = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|im_end|>")
    assert episode.segments[1].token_ids.count(end) == 1, "of the tool's turn; what the code printed is text"
    assert (episode.end, episode.metrics["failed_calls"]) == ("done", 5.0)


def test_runs_of_code_are_beside_each_other_and_in_order(folder: Path) -> None:
    config = environment(tools=["python"])
    with config.opened(folder) as make:
        calls = [Action("", (Call("python", {"code": f"print({number})"}),)) for number in range(6)]
        with ThreadPoolExecutor(config.num_threads) as pool:
            steps = list(pool.map(lambda one: make().step(one), calls))
    assert [step.messages[0]["content"] for step in steps] == [f"{number}\n" for number in range(6)]
    assert environment().num_threads == 1


def write_texts(folder: Path) -> Path:
    (folder / "texts" / "more").mkdir(parents=True)
    (folder / "texts" / "a.md").write_text("The capital of France is Paris.\n\nThe Seine flows through Paris, Paris.")
    (folder / "texts" / "more" / "b.txt").write_text("Łódź is a city.\n \n" + "long " * 500)
    (folder / "texts" / "picture.png").write_bytes(b"\x89PNG\xff")
    (folder / "texts" / "old.log").write_text("Paris, as a log says")
    return folder / "texts"


def test_search_scores_by_bm25(tmp_path: Path) -> None:
    passages = Passages(write_texts(tmp_path))
    assert [text[:20] for text in passages.texts] == [
        *("a.md: The capital of", "a.md: The Seine flow", "more/b.txt: Łódź is "),
        *["more/b.txt: long lon"] * 3,
    ]
    words = [re.findall(r"\w+", text.lower()) for text in passages.texts]
    mean = sum(map(len, words)) / len(words)
    for query in ("paris", "the city of Paris", "ŁÓDŹ", "long capital long"):
        for number, score in passages.scores(query).items():
            expected = 0.0
            for word in {*query.lower().split()}:
                frequency, num_with = words[number].count(word), sum(word in others for others in words)
                idf = math.log(1 + (len(words) - num_with + 0.5) / (num_with + 0.5))
                length = 1 - B + B * len(words[number]) / mean
                expected += idf * frequency * (K1 + 1) / (frequency + K1 * length)
            assert score == pytest.approx(expected, rel=1e-12)
    assert passages.search("Seine").startswith("a.md: The Seine")
    with pytest.raises(ValueError, match="no passage"):
        passages.search("? telephone")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="has no text to search"):
        Passages(tmp_path / "none")


def test_a_folder_that_is_searched_is_an_outside_path_of_the_stage(folder: Path, tmp_path: Path) -> None:
    texts = write_texts(tmp_path)
    search = environment(tools=["calculator", {"search": texts}])
    right = {"right": {"type": "exact_match"}}
    grpo = {"rewards": right, "environment": search.model_dump(), "max_completion_length": 8}
    config = make_config("grpo", grpo=grpo, global_batch_size=8)
    assert config.outside_paths() == {"grpo.environment.tools.1.search": texts}
    assert str(texts) not in json.dumps(config.identity()) and "code_timeout_s" not in json.dumps(config.identity())
    episode, _ = play(
        folder, [tool_call("search", query="Seine"), "Paris<|im_end|>"], tools=["calculator", {"search": texts}]
    )
    assert "\na.md: The Seine flows through Paris, Paris.\n\na.md: The capital" not in answers(folder, episode)[0]
    assert "\na.md: The Seine flows through Paris, Paris.\n" in answers(folder, episode)[0]


def test_one_environment_is_named_by_its_field() -> None:
    with pytest.raises(ValidationError, match="expected one environment, by one of the fields tools, python"):
        TypeAdapter(AnyEnvironment).validate_python({"max_turns": 2})
    with pytest.raises(ValidationError, match="`tools` has search twice"):
        TypeAdapter(AnyEnvironment).validate_python({"tools": [{"search": "a"}, "calculator", {"search": "b"}]})
    with pytest.raises(ValidationError, match="calculator"):
        TypeAdapter(AnyEnvironment).validate_python({"tools": ["telephone"]})
    with pytest.raises(ValidationError, match=r"tools\.tools\.0\.search\.serch"):
        TypeAdapter(AnyEnvironment).validate_python({"tools": [{"serch": "texts"}]})


GAME = """
import socket, threading, time
{at_import}
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


def own(
    folder: Path,
    tmp_path: Path,
    step: str,
    turns: list[str],
    tools: str = "[]",
    at_import: str = "",
    most_tokens: int = 1000,
    **fields: Any,
):
    """Play one episode in an author's environment, whose method `step` is given."""
    (tmp_path / "env.py").write_text(GAME.format(step=step, tools=tools, at_import=at_import))
    config = TypeAdapter(AnyEnvironment).validate_python({"python": tmp_path / "env.py", **fields})
    prompt = Conversation([make_message("user", "Play.")], tools=config.definitions)
    tokenizer, encode = DocumentTokenizer(folder, None, "assistant"), AutoTokenizer.from_pretrained(folder).encode
    reader = TurnReader.proved(tokenizer, encode("<|im_end|>"), config, prompt)
    with config.opened(tmp_path) as make:
        episodes = Episodes(config, make, reader, most_tokens, 64, lambda seed, turn: seed)
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
        ("self.leak = [bytearray(1 << 29) for _ in range(9)]", "MemoryError"),
        ("return ('more', float('inf'), False)", "step gave Infinity; expected a finite number as reward"),
        ("return ('more', True, False)", "step gave true; expected a finite number as reward"),
        ("return ('more', 1, 'no')", 'step gave "no"; expected true or false for done'),
        ("return (['more', 5], 1, False)", "expected a text as observation, or a list"),
        ("return (b'more', 1, False)", "is not JSON serializable"),
        ("raise SystemExit(1)", "ended its process with exit code 1"),
        ("import os; os.kill(os.getpid(), 9)", "PermissionError"),
        ("x = []; x.append(x); return (x, 1, False)", "RecursionError"),
        ("open('/proc/%d/environ' % __import__('os').getppid()).read()", "PermissionError"),
    ],
)
def test_what_an_author_s_class_does_wrong_is_one_sentence(
    folder: Path, tmp_path: Path, step: str, problem: str
) -> None:
    with pytest.raises(DataError) as error:
        own(folder, tmp_path, step, ["5<|im_end|>"], timeout_s=2, memory_gib=0.5)
    assert problem in str(error.value) and "\n" not in str(error.value)


def test_a_thread_that_an_author_s_file_started_has_no_network_either(folder: Path, tmp_path: Path) -> None:
    thread = """
problems, go = [], threading.Event()
def call():
    go.wait()
    try:
        socket.create_connection(("127.0.0.1", 1))
    except OSError as error:
        problems.append(type(error).__name__)
caller = threading.Thread(target=call, daemon=True)
caller.start()
"""
    step = "go.set(); caller.join(); return (problems[0], 0, False)"
    episode = own(folder, tmp_path, step, ["1<|im_end|>", "<|im_end|>"], at_import=thread, max_turns=2)
    assert "PermissionError" in answers(folder, episode)[0]


def test_an_environment_says_what_it_could_read_where_the_kernel_has_no_landlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = TypeAdapter(AnyEnvironment).validate_python({"python": "env.py"})
    monkeypatch.setattr(code_program, "landlock_version", lambda: 1)
    assert list(config.warnings()) == list(environment().warnings()) == []
    monkeypatch.setattr(code_program, "landlock_version", lambda: 0)
    (warning,) = config.warnings()
    assert "env.py: Environment can read the stage's environment variables" in warning


def test_arguments_that_are_nested_deeply_do_not_end_a_training(folder: Path, tmp_path: Path) -> None:
    step = "return (['5'], 0, False) if action['calls'] else ('6', 0, False)"
    for depth in (200, 900, 5000):
        nested = "[" * depth + "]" * depth
        turn = f'<tool_call>{{"name": "f", "arguments": {{"a": {nested}}}}}</tool_call><|im_end|>'
        episode = own(folder, tmp_path, step, [turn, "x<|im_end|>"], '[{"name": "f"}]', max_turns=2, most_tokens=20_000)
        assert len(episode.segments) == 3, depth


def test_megabytes_of_an_environment_are_cut(folder: Path, tmp_path: Path) -> None:
    step = "return ('x' * 5_000_000, 0, False)"
    episode = own(folder, tmp_path, step, ["1<|im_end|>", "<|im_end|>"], max_answer_bytes=50, max_turns=2)
    assert "x" * 50 + " … (cut off)" in answers(folder, episode)[0] and episode.metrics["cut_answers"] == 1
