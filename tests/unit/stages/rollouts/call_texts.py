"""Answers of models with calls of tools in each form: well-formed, nested, several, broken, in many scripts, in prose.

`python -m tests.unit.stages.rollouts.call_texts` records what vLLM's parsers make of them in `vllm_calls.json`.
"""

import json
import random
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.data.calculator import DEFINITION
from stages.hubs.builtin import qwen3_tools

RECORDED = Path(__file__).with_name("vllm_calls.json")
PYTHON = Path(__file__).parents[4] / ".venv-serve/bin/python"
NUM_TEXTS = 120
"""Number of recorded texts of each form."""
TYPED = {
    "type": "function",
    "function": {
        "name": "typed",
        "parameters": {
            "type": "object",
            "properties": {
                "whole": {"type": "integer"},
                "number": {"type": "number"},
                "flag": {"type": "boolean"},
                "none": {"type": ["null", "string"]},
                "list": {"type": "array", "items": {"type": "integer"}},
                "object": {"type": "object"},
                "choice": {"enum": [1, "a"]},
                "any": {"anyOf": [{"type": "integer"}, {"type": "object"}]},
                "python": {"type": "dict"},
                "odd": {"type": "uuid"},
                "plain": {},
            },
        },
    },
}
TOOLS = [DEFINITION, TYPED]
VALUES = (
    *("1", "-2", "1.5", "1e3", "1e999", "NaN", "true", "False", "null", "Null", "[1, 2]", "[1e999]"),
    *('{"a": [1]}', "a", "", " 1 ", "1_000", "日本", "🙂", "a\nb", "\n\nx\n\n", "<", ">", "x > 1 && y < 2"),
    *("<|im_end|>", "<tool_call>", "{"),
)
PROSE = (
    *("I think so. ", "Für 日本: 🙂 ", "\n", " ", "so {x} is ", "<think>a < b > c</think>", "<|im_end|>", "; "),
    *("", ""),
)
ARGUMENTS = (
    *('{"expression": "3 * 4"}',) * 20,
    *("{}", '{"expression": "1 + 2"}', '{"a": {"b": [1, {"c": null}]}}', '{"t": "日本 \\u00e9 🙂 \\"q\\""}'),
    *("[1]", "null", '"text"', "NaN", '{"a": "</tool_call>"}', '{"a": "{"}', '{"a": "\\ud800"}', '{"a": 1'),
    *("", "[" * 1200),
)
NAMES = *('"name": "calculator"',) * 9, '"name": "日本"', '"name": "a"', '"name": 5', '"nam": "x"'
BROKEN = "", "{", "}", "<", ">", '"', "</function>", "<function="


def hermes(chosen: random.Random) -> str:
    """Return a call of Hermes and Qwen."""
    name = chosen.choice(NAMES)
    field = chosen.choice(("arguments",) * 6 + ("parameters",))
    call = f'{{{name}, "{field}": {chosen.choice(ARGUMENTS)}}}'
    return f"{chosen.choice(('<tool_call>',) * 9 + ('',))}\n{call}\n{chosen.choice(('</tool_call>',) * 9 + ('',))}"


def llama3_json(chosen: random.Random) -> str:
    """Return a call of Llama 3."""
    call = hermes(chosen).replace("<tool_call>", chosen.choice(("", "<|python_tag|>"))).replace("</tool_call>", "")
    return call.replace('"arguments"', chosen.choice(('"arguments"', '"parameters"'))).strip(chosen.choice((" ", "\n")))


def qwen3_coder(chosen: random.Random) -> str:
    """Return a call of Qwen3-Coder."""
    keys = [*TYPED["function"]["parameters"]["properties"], "expression", "other", " spaced "]  # type: ignore[index]
    parameters = [
        f"<parameter={chosen.choice(keys)}>\n{chosen.choice(VALUES)}\n</parameter>" for _ in range(chosen.randrange(5))
    ]
    name = chosen.choice(("typed",) * 5 + ("calculator", "日本", "", " typed "))
    pieces = ["<tool_call>", "\n", f"<function={name}>", "\n", *parameters, "\n", "</function>", "\n", "</tool_call>"]
    return "".join(piece for piece in pieces if chosen.random() < 0.97)


FORMS = {"hermes": hermes, "llama3_json": llama3_json, "qwen3_coder": qwen3_coder}


def texts(form: str, count: int, seed: int) -> list[str]:
    """Return texts with calls of a form, most of them well-formed."""
    chosen = random.Random(f"{form} {seed}")
    return [_text(form, chosen) for _ in range(count)]


def _text(form: str, chosen: random.Random) -> str:
    calls = [FORMS[form](chosen) for _ in range(chosen.choice((0, 1, 1, 1, 2, 2, 3)))]
    text = chosen.choice(PROSE) + chosen.choice(PROSE).join(calls) + chosen.choice(PROSE)
    for _ in range(chosen.choice((0, 0, 0, 0, 0, 1, 3))):  # broken
        place = chosen.randrange(len(text) + 1)
        text = text[:place] + chosen.choice(BROKEN) + text[place + 1 :]
    return text


def ask_vllm(asked: dict[str, list[str]]) -> dict[str, list[list[list[Any]]]]:
    """Return the calls that vLLM's parsers find in texts, by form."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = qwen3_tools.make_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})  # which Llama's parser wants
        tokenizer.save_pretrained(folder)
        questions = [{"form": form, "tools": TOOLS, "texts": asked[form]} for form in asked]
        program = Path(__file__).with_name("vllm_calls.py")
        answered = subprocess.run(
            [PYTHON, program, folder],
            input=json.dumps(questions),
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
    return dict(zip(asked, json.loads(answered.stdout.splitlines()[-1]), strict=True))


def recorded() -> dict[str, list[tuple[str, list[list[Any]]]]]:
    """Return the recorded texts of each form, with the calls that vLLM found."""
    content: dict[str, list[tuple[str, list[list[Any]]]]] = json.loads(RECORDED.read_text("utf-8"))
    return content


def _record(forms: Sequence[str] = tuple(FORMS)) -> None:
    asked = {form: texts(form, NUM_TEXTS, 0) for form in forms}
    answers = ask_vllm(asked)
    pairs = {form: list(zip(asked[form], answers[form], strict=True)) for form in forms}
    RECORDED.write_text(json.dumps(pairs, indent=0, ensure_ascii=True) + "\n", "utf-8")


if __name__ == "__main__":
    _record()
