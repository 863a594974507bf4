"""Each reward function returns its documented score, and reports why it cannot score a completion."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import TypeAdapter, ValidationError

from stages.core import patterns
from stages.core.errors import DataError
from stages.data.messages import PlainText
from stages.rewards import json_schema, regex
from stages.rewards.judging import Judgement, Named, judging
from stages.rewards.registry import AnyReward
from stages.rewards.reward import Completion, Reward, RewardContext


def reward(**config: Any) -> Reward:
    return TypeAdapter(AnyReward).validate_json(json.dumps(config), strict=True)


def completion(text: str, reference: str | None = None, num_tokens: int = 1, **row: Any) -> Completion:
    return Completion("the prompt", text, num_tokens, reference, row, PlainText("the prompt", ""))


CONTEXT = RewardContext({}, Path("/nowhere"), lambda message: None)


def judged(rewards: dict[str, Reward], completions: list[Named]) -> list[Judgement]:
    with judging(rewards, CONTEXT) as judge:
        return judge(completions)


CASES = [
    ({"type": "exact_match"}, " 46\n", "46", 1),
    ({"type": "exact_match"}, "the answer is 46", "46", 0),
    ({"type": "exact_match"}, "paris", "Paris", 0),
    ({"type": "exact_match", "ignore_case": True}, "paris", "Paris", 1),
    ({"type": "number"}, "12 + 34 is 46.", "46", 1),
    ({"type": "number"}, "46, not 47", "46", 0),
    ({"type": "number"}, "so it is $1,234.50!", "#### 1234.5", 1),
    ({"type": "number"}, "it is 12-34", "34", 1),
    ({"type": "number"}, "minus: -34", "34", 0),
    ({"type": "number"}, "minus: −34", "-34", 1),
    ({"type": "number"}, "6.02e23", "602000000000000000000000", 1),
    ({"type": "number"}, "0.1", ".10", 1),
    ({"type": "number"}, "none", "3", 0),
    ({"type": "number"}, "3.14", "3.14159", 0),
    ({"type": "number", "tolerance": 0.01}, "3.14", "3.14159", 1),
    ({"type": "number"}, "9007199254740993", "9007199254740992", 0),
    ({"type": "regex", "pattern": r"\\boxed\{\d+\}"}, r"it is \boxed{46}", None, 1),
    ({"type": "regex", "pattern": r"\A\d+\Z"}, "it is 46", None, 0),
    ({"type": "format"}, "<think>12 + 34</think>\n<answer>46</answer>\n", None, 1),
    ({"type": "format"}, "<answer>46</answer><think>12 + 34</think>", None, 0),
    ({"type": "format"}, "<think></think><answer>46</answer>", None, 0),
    ({"type": "format"}, "<think>a</think><answer>46</answer> and more", None, 0),
    ({"type": "format"}, "<think>a<think>b</think><answer>46</answer>", None, 0),
    ({"type": "format", "tags": ["sql"]}, "<sql>SELECT 1</sql>", None, 1),
    ({"type": "json_schema", "json_schema": {"required": ["a"]}}, '{"a": 1}', None, 1),
    ({"type": "json_schema", "json_schema": {"required": ["a"]}}, '{"b": 1}', None, 0),
    ({"type": "json_schema", "json_schema": {}}, "Here it is: {}", None, 0),
    ({"type": "json_schema", "json_schema": {}}, "[" * 100_000, None, 0),
    ({"type": "json_schema", "json_schema": {"pattern": r"^(?=.*1)\d+$"}}, '"21"', None, 1),
    *(({"type": "json_schema", "json_schema": {"multipleOf": 0.1}}, text, None, 0) for text in ("1e400", "NaN")),
    ({"type": "json_schema", "json_schema": {"multipleOf": 0.1}}, f"1{'0' * 400}", None, 0),
]


@pytest.mark.parametrize(("config", "text", "reference", "expected"), CASES)
def test_score(config: dict[str, Any], text: str, reference: str | None, expected: float) -> None:
    assert reward(**config).score(completion(text, reference)) == expected


@pytest.mark.parametrize(("num_tokens", "expected"), [(50, 0), (80, 0), (90, -0.5), (100, -1), (101, -1)])
def test_a_long_completion_is_punished_the_more_the_longer_it_is(num_tokens: int, expected: float) -> None:
    found = reward(type="length", max_tokens=100, soft_tokens=20).score(completion("a", num_tokens=num_tokens))
    assert found == pytest.approx(expected)
    assert reward(type="length", max_tokens=100).score(completion("a", num_tokens=100)) == 0


LOOPS = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}}, "$ref": "#/$defs/a"}
DOUBLES = {f"a{number}": {"allOf": [{"$ref": f"#/$defs/a{number + 1}"}] * 2} for number in range(40)}
ENDLESS: list[tuple[dict[str, Any], str]] = [
    ({"type": "regex", "pattern": r"(?:a|aa)+$"}, "a" * 60 + "!"),
    *(
        ({"type": "json_schema", "json_schema": schema}, json.dumps(content))
        for schema, content in (
            ({"pattern": "^(a+)+$"}, "a" * 60 + "!"),
            ({"patternProperties": {"^(a+)+$": {}}}, {"a" * 60 + "!": 1}),
            ({"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False}, {"a" * 60 + "!": 1}),
            ({"$defs": {**DOUBLES, "a40": {}}, "$ref": "#/$defs/a0"}, 1),
            (LOOPS, 1),
        )
    ),
]


@pytest.mark.parametrize(("config", "text"), ENDLESS)
def test_a_comparison_that_takes_for_ever_counts_as_wrong_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], text: str
) -> None:
    for module in (patterns, regex, json_schema):
        monkeypatch.setattr(module, "LIMIT_S", 0.15)
    warnings: list[str] = []
    with reward(**config).opened("own", RewardContext({}, Path("/nowhere"), warnings.append)) as scores:
        assert list(scores([completion(text), completion("not JSON")])) == [0, 0]
    assert len(warnings) == 1
    assert "the reward own: 1 of 2 comparisons took over 0.15 s" in warnings[0]
    assert reward(**config).score(completion(text)) == 0


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"type": "regex", "pattern": "("}, "is no regular expression: missing"),
        ({"type": "regex", "pattern": "(?:(?:(?:(?:a{999}){999}){999}){999}){999}"}, "or too much memory, to be read"),
        ({"type": "json_schema", "json_schema": {"type": 5}}, "is no JSON Schema"),
        (
            {"type": "json_schema", "json_schema": {"$ref": "https://example.org/x"}},
            "refers to 'https://example.org/x'",
        ),
        ({"type": "length", "max_tokens": 5, "soft_tokens": 6}, "`soft_tokens` is 6; expected at most"),
        ({"type": "exact_match", "weight": 0}, "`weight` is 0"),
        ({"type": "exactmatch"}, "exact_match"),
        ({"type": "python", "file": "a.py", "function": "os.system"}, "function"),
        ({"type": "python", "file": "a.py", "minimum": 1, "maximum": 1}, "`minimum` is 1; expected less than"),
    ],
)
def test_what_a_recipe_cannot_mean(config: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected.replace("(", r"\(")):
        reward(**config)


def programs() -> list[list[str]]:
    """Return the command lines of the child processes that run a user's Python reward file."""
    # None of a process that has ended, as one may have of earlier tests that no one has waited for.
    children = [child.as_dict(["cmdline"])["cmdline"] for child in psutil.Process().children()]
    return [line for line in children if line and "stages.rewards.python_program" in line]


def python(folder: Path, code: str, **config: Any) -> Reward:
    (folder / "rewards.py").write_text(textwrap.dedent(code))
    return reward(type="python", file=str(folder / "rewards.py"), **config)


def test_a_file_of_ones_own_judges_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("FACTOR = 2")
    own = python(
        tmp_path,
        """
        import os
        from beside import FACTOR

        print("what it prints is no answer")
        process = os.getpid()

        def score(prompt, completion, reference, row):
            print("nor this", completion)
            assert process == os.getpid() != row["parent"]
            return FACTOR * (len(completion) + len(prompt)) if reference == "r" else -1
        """,
    )
    with own.opened("own", CONTEXT) as scores:
        asked = [completion(text, "r", parent=os.getpid()) for text in ("abc", "ü\n\N{ROCKET}")]
        assert list(scores(asked)) == list(scores(asked)) == [26, 26]
    assert not programs()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import nothing_like_it", "cannot be imported: ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("exit(3)", "cannot be imported: SystemExit: 3"),
        ("def judge(*_): return 1", "has no function 'score'"),
        ("score = 3", "is int; expected a function"),
        ("def score(completion): return 1", "takes (completion) (too many positional arguments); expected a function"),
        ("def score(*_): return 1 / 0", "ZeroDivisionError: division by zero"),
        ("def score(*_): return 'good'", 'gave "good"; expected a number'),
        ("def score(*_): return None", "gave null; expected a number"),
        ("def score(*_): return object()", "TypeError: Object of type object is not JSON serializable"),
        ("import os\ndef score(*_): os._exit(7)", "ended its process with exit code 7"),
        (
            "def score(*_): return 10**400",
            "0000…; expected a number from -1.8e+308 to 1.8e+308",
        ),
        ("def score(*_): return -10**5000", "ValueError: Exceeds the limit"),
        ("def score(*_): return float('nan')", "the reward own is nan; expected a finite number"),
    ],
)
def test_what_a_file_does_wrong_is_named_with_the_completion(tmp_path: Path, code: str, expected: str) -> None:
    own = python(tmp_path, code)
    with pytest.raises(DataError) as caught:
        judged({"own": own}, [("completion 0 of the prompt in a.jsonl:1", completion("a"))])
    assert expected in str(caught.value)


HALF_A_LINE = """
import os, time

def score(*_):
    for descriptor in range(3, 20):  # also the one that answers are written to
        try:
            os.write(descriptor, b'{"answer": ')
        except OSError:
            pass
    time.sleep(1000)
"""
LEAVES_A_CHILD = """
import subprocess, time

def score(*_):
    subprocess.Popen(["sleep", "654321"], start_new_session=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("code", ["def score(*_):\n    while True: pass", HALF_A_LINE, LEAVES_A_CHILD])
def test_a_function_that_does_not_end_is_ended(tmp_path: Path, code: str) -> None:
    own = python(tmp_path, code, timeout_s=3)
    started_s = time.monotonic()
    with pytest.raises(DataError, match="gave no answer within timeout_s, 3 s"):
        own.score(completion("a"))
    assert time.monotonic() - started_s < 60
    assert not programs()
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "654321"]
    ]


def test_the_sum_is_weighted() -> None:
    rewards = {"right": reward(type="exact_match"), "brief": reward(type="length", max_tokens=1, weight=0.25)}
    found = judged(rewards, [("", completion("1", "1")), ("", completion("1", "1", num_tokens=9))])
    assert [one.total for one in found] == [1.0, 0.75]
    assert found[1].rewards == {"right": 1.0, "brief": -1.0}


def test_without_rewards_completions_are_judged_by_nothing() -> None:
    assert [one.total for one in judged({}, [("", completion("1")), ("", completion("2"))])] == [0, 0]


@pytest.mark.parametrize(
    ("score", "bounds", "expected"),
    [
        (2, {"maximum": 1}, "the reward own is 2; expected a number from -inf to 1"),
        (-2, {"minimum": -1, "maximum": 1}, "the reward own is -2; expected a number from -1 to 1"),
        (2, {"minimum": -1}, None),
    ],
)
def test_a_number_out_of_bounds_is_named_with_its_completion(
    tmp_path: Path, score: float, bounds: dict[str, float], expected: str | None
) -> None:
    own = python(tmp_path, f"def score(*_): return {score}", **bounds)
    if expected is None:
        assert judged({"own": own}, [("completion 3", completion("a"))])[0].total == score
        return
    with pytest.raises(DataError, match=f"completion 3: {expected}"):
        judged({"own": own}, [("completion 3", completion("a"))])


SPY = """
import os

def score(prompt, completion, reference, row):
    found = repr(sorted(os.environ.items()))
    for folder in os.listdir("/proc"):
        if folder.isdigit() and int(folder) != os.getpid():
            for file in ("environ", "mem"):
                try:
                    found += open(f"/proc/{folder}/{file}", "rb").read(1 << 20).decode(errors="replace")
                except OSError:
                    continue
    return float("planted" in found)
"""


def test_no_key_is_within_reach_of_a_file_of_ones_own(tmp_path: Path) -> None:
    """A user's reward file finds no API key in any process's environment, as it does when it runs unprotected."""
    (tmp_path / "rewards.py").write_text(SPY)
    asks = textwrap.dedent(
        """
        import runpy, sys
        from pathlib import Path
        from tests.unit.stages.rewards.test_rewards import completion, judged, reward

        print(runpy.run_path(sys.argv[1])["score"]("", "", None, {}))
        own = reward(type="python", file=sys.argv[1])
        print(judged({"own": own}, [("", completion("a"))])[0].total)
        """
    )
    keys = dict.fromkeys(("VLLM_API_KEY", "HF_TOKEN", "PREFECT_API_AUTH_STRING", "ANYTHING"), "planted")
    root = Path(__file__).parents[4]
    environment = {**os.environ, **keys, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", asks, str(tmp_path / "rewards.py")]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1.0", "0.0"]
