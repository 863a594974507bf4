"""Parsers of the calls of tools in a model's answer, each equal to vLLM's parser of that name.

So a call that counts in training counts when the model is served. Where vLLM's parser gives an answer back as text,
these say what is wrong with it, which the model can read.
"""

import json
import re
from collections.abc import Callable

from stages.core.errors import DataError
from stages.models.call_formats import call_format
from stages.rollouts.environments.environment import Action, Call

Parse = Callable[[str], tuple[Call, ...]]
"""Function from an answer to its calls. Raises ValueError with the reason where it has what looks like a call."""
BEGIN, END = "<tool_call>", "</tool_call>"


def parse_hermes(text: str) -> tuple[Call, ...]:
    """Return the calls between `<tool_call>` and `</tool_call>`, or the text's end, each an object of JSON."""
    calls: list[Call] = []
    while BEGIN in text:
        inner, _, text = text.partition(BEGIN)[2].partition(END)
        calls.append(_call(_json(inner), ("arguments",)))
    return tuple(calls)


def parse_llama3_json(text: str) -> tuple[Call, ...]:
    """Return the calls that an answer of Llama 3 has: every object of JSON in it, whatever stands between them.

    Braces of a sentence, such as those of a formula, are text, as vLLM takes them; an answer that begins with one is a
    call.
    """
    try:
        return _calls_in(text)
    except ValueError:
        if re.match(r"\s*(<\|python_tag\|>)?\s*\{", text):
            raise
        return ()


def _calls_in(text: str) -> tuple[Call, ...]:
    calls: list[Call] = []
    begin = text.find("{")
    while begin >= 0:
        try:
            found, end = json.JSONDecoder().raw_decode(text[begin:])
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the call is no JSON: {error}") from None
        calls.append(_call(found, ("arguments", "parameters")))
        begin = text.find("{", begin + end + 1)
    return tuple(calls)


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the call is no JSON: {error}") from None


def _call(content: object, fields: tuple[str, ...]) -> Call:
    if not isinstance(content, dict) or not isinstance(content.get("name"), str):
        raise ValueError('the call has no "name"')
    field = next((field for field in fields if field in content), None)
    if field is None:
        raise ValueError(f'the call has no "{fields[0]}"')
    return Call(content["name"], content[field])


PARSERS: dict[str, Parse] = {"hermes": parse_hermes, "llama3_json": parse_llama3_json}
"""Parsers by the name of the format (`stages/models/call_formats.py`)."""


def parser_for(template: str, tokens: frozenset[str], name: str) -> Parse:
    """Return the parser of the calls that a chat template writes. Raises DataError for another format, or none.

    tokens: of the tokenizer. name: the template's, in the error.
    """
    form = call_format(template, tokens)
    if form not in PARSERS:
        shown = f"writes calls as vLLM's parser {form} reads them" if form else "shows no known format of calls"
        raise DataError(
            f"{name} {shown}, which episodes cannot read; expected one of {', '.join(PARSERS)}: use another model, or "
            "a template (`data.chat_template`)"
        )
    return PARSERS[form]


def action(text: str, parse: Parse | None) -> Action:
    """Return a model's turn with the calls in it. parse: None for an environment without tools."""
    if parse is None:
        return Action(text)
    try:
        return Action(text, parse(text))
    except ValueError as error:
        return Action(text, malformed=str(error))
