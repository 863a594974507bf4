"""Parsers of the calls of tools in a model's answer, each equal to vLLM's parser of that name.

So a call that counts in training counts when the model is served. Where vLLM's parser gives an answer back as text,
these say what is wrong with it, which the model can read.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stages.core.errors import DataError
from stages.data.json_values import flaw_of
from stages.data.messages import Tool
from stages.models.call_formats import call_format
from stages.rollouts.environments.environment import Action, Call

Parse = Callable[[str], tuple[str, tuple[Call, ...]]]
"""Function from an answer to the text before its first call, and its calls.

Raises ValueError with the reason where it has what looks like a call."""
ParserOfTools = Callable[[Sequence[Tool], frozenset[str]], Parse]
"""Function that returns the parser of answers to prompts with these tools, given the tokenizer's special tokens."""
BEGIN, END = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
MOST_CALLS = 32
"""Largest number of calls in a turn."""


def parse_hermes(text: str) -> tuple[str, tuple[Call, ...]]:
    """Return the calls between `<tool_call>` and `</tool_call>`, or the text's end, each an object of JSON."""
    before = text.partition(BEGIN)[0]
    calls: list[Call] = []
    while BEGIN in text:
        inner, _, text = text.partition(BEGIN)[2].partition(END)
        calls.append(_call(_json(inner), ("arguments",)))
    return before, tuple(calls)


def parse_llama3_json(text: str) -> tuple[str, tuple[Call, ...]]:
    """Return the calls that an answer of Llama 3 has: every object of JSON in it, whatever stands between them.

    Braces of a sentence, such as those of a formula, are text, as vLLM takes them; an answer that begins with one is a
    call.
    """
    before = text.partition("{")[0].rstrip().removesuffix(PYTHON_TAG)
    try:
        return before, _calls_in(text)
    except ValueError:
        if not before.strip():
            raise
        return text, ()


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


FUNCTION, FUNCTION_END = "<function=", "</function>"
MARKUP = BEGIN, END, FUNCTION, FUNCTION_END, "<parameter=", "</parameter>", "<think>", "</think>", ">"
PARAMETER = re.compile(r"<\s*parameter\s*=\s*")
PARAMETER_END = re.compile(r"<\s*/\s*parameter\s*>|(?=<\s*parameter\s*=)")
OUTSIDE, BEFORE_NAME, NAME, BODY, AFTER = "outside", "before name", "name", "body", "after"
STARTS = BEGIN, FUNCTION
STATES = {
    (OUTSIDE, BEGIN): BEFORE_NAME,
    (OUTSIDE, FUNCTION): NAME,
    (BEFORE_NAME, FUNCTION): NAME,
    (BEFORE_NAME, END): OUTSIDE,
    (NAME, ">"): BODY,
    (NAME, FUNCTION_END): AFTER,
    (BODY, FUNCTION_END): AFTER,
    (AFTER, BEGIN): BEFORE_NAME,
    (AFTER, FUNCTION): NAME,
    (AFTER, END): OUTSIDE,
}
"""State of reading a call as XML, by the state before and the markup that ends it; other markup is text."""


def qwen3_coder(tools: Sequence[Tool], special: frozenset[str]) -> Parse:
    """Return the parser of calls as XML: `<function=NAME>` with a `<parameter=NAME>` for each argument.

    Arguments are texts, which take the types of the tool's JSON schema. Special tokens of the tokenizer are left out.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    left_out = special.difference(MARKUP)
    markup = re.compile("|".join(map(re.escape, sorted({*MARKUP, *left_out}, key=len, reverse=True))))

    def parse(text: str) -> tuple[str, tuple[Call, ...]]:
        spans = list(_spans(text, markup, left_out))
        calls = tuple(_xml_call(name.strip(), body, schemas) for name, body in spans if name.strip())
        if spans and not calls:
            raise ValueError(f"the call has no {FUNCTION}NAME>")
        return min((text.partition(start)[0] for start in STARTS), key=len), calls

    return parse


def _spans(text: str, markup: re.Pattern[str], left_out: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield name and body of each call in a text, whatever of them is there; the text's end closes the last one."""
    state, begun = OUTSIDE, False
    parts: dict[str, str] = {NAME: "", BODY: ""}
    end = 0
    for tag in markup.finditer(text):
        _add(parts, state, text[end : tag.start()])
        end = tag.end()
        after = STATES.get((state, tag[0]))
        if after is None:
            _add(parts, state, "" if tag[0] in left_out else tag[0])
            continue
        if tag[0] in STARTS and state in (OUTSIDE, AFTER):  # a new call
            if begun:
                yield parts[NAME], parts[BODY]
            parts, begun = {NAME: "", BODY: ""}, True
        state = after
    _add(parts, state, text[end:])
    if begun:
        yield parts[NAME], parts[BODY]


def _add(parts: dict[str, str], state: str, text: str) -> None:
    if state in parts:
        parts[state] += text


def _xml_call(name: str, body: str, schemas: Mapping[str, Mapping[str, Any]]) -> Call:
    properties = schemas.get(name, {}).get("properties") or {}
    arguments: dict[str, Any] = {}
    for key, value in _parameters(body):
        text = value.removeprefix("\n").removesuffix("\n")
        schema = properties.get(key)
        arguments[key] = _typed(text, _types(schema)) if isinstance(schema, dict) else text
    return Call(name, arguments)


def _parameters(body: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of each parameter that has an end: its own, or the beginning of the next one.

    By two patterns, so that time is in proportion to the text: a model may repeat `<parameter=` until it is cut off.
    """
    end = 0
    while (begin := PARAMETER.search(body, end)) and (close := body.find(">", begin.end())) >= 0:
        ending = PARAMETER_END.search(body, close + 1)
        if ending is None:
            return
        yield body[begin.end() : close], body[close + 1 : ending.start()]
        end = ending.end()


def _types(schema: object) -> set[str]:
    """Return the types that a JSON schema allows, as it spells them; `string` if it names none."""
    if not isinstance(schema, dict):
        return {"string"}
    named = schema.get("type", [])
    types = {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
    types |= {JSON_TYPES[type(value)] for value in schema.get("enum") or [] if type(value) in JSON_TYPES}
    for field in ("anyOf", "oneOf", "allOf"):
        for choice in schema.get(field) or []:
            types |= _types(choice)
    return types or {"string"}


JSON_TYPES: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
SPELLINGS = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "uint32", "uint64", "long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double"), "number"),
    **dict.fromkeys(("arr", "list", "sequence"), "array"),
    "bool": "boolean",
    "dict": "object",
}
"""Types as tools of many languages spell them."""


def _typed(text: str, types: set[str]) -> Any:
    """Return a text as the first of its types that it can be: null, integer, number, boolean, object, array, string."""
    names = {SPELLINGS.get(name, name) for name in (one.strip().lower() for one in types)}
    for name, read in READERS.items():
        if name in names:
            try:
                return read(text)
            except ValueError:
                continue
    if "string" in names:
        return text
    try:
        return _finite(text)
    except ValueError:
        return text


def _null(text: str) -> None:
    if text.lower() != "null":
        raise ValueError


def _number(text: str) -> float | int:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return int(value) if value == int(value) else value


def _boolean(text: str) -> bool:
    lower = text.lower().strip()
    if lower not in ("true", "1", "false", "0"):
        raise ValueError
    return lower in ("true", "1")


def _finite(text: str) -> Any:
    """Return the value of a JSON text; raises ValueError for one that JSON cannot write again, such as NaN."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except RecursionError:
        raise ValueError from None
    return value


READERS: dict[str, Callable[[str], Any]] = {
    "null": _null,
    "integer": int,
    "number": _number,
    "boolean": _boolean,
    "object": _finite,
    "array": _finite,
}

PARSERS: dict[str, ParserOfTools] = {
    "hermes": lambda _tools, _special: parse_hermes,
    "llama3_json": lambda _tools, _special: parse_llama3_json,
    "qwen3_coder": qwen3_coder,
}
"""Parsers by the name of the format (`stages/models/call_formats.py`)."""


def parser_for(template: str, tokens: frozenset[str], name: str, tools: Sequence[Tool]) -> Parse:
    """Return the parser of the calls that a chat template writes. Raises DataError for another format, or none.

    tokens: the tokenizer's special ones. name: the template's, in the error. tools: those that may be called.
    """
    form = call_format(template, tokens)
    if form not in PARSERS:
        shown = f"writes calls as vLLM's parser {form} reads them" if form else "shows no known format of calls"
        raise DataError(
            f"{name} {shown}, which episodes cannot read; expected one of {', '.join(PARSERS)}: use another model, or "
            "a template (`data.chat_template`)"
        )
    return PARSERS[form](tools, tokens)


def action(text: str, parse: Parse | None) -> Action:
    """Return a model's turn with the calls in it. parse: None for an environment without tools."""
    if parse is None:
        return Action(text)
    try:
        before, calls = parse(text)
        _check(calls)
    except ValueError as error:
        return Action(text, malformed=str(error))
    return Action(text, calls, before=before)


def _check(calls: tuple[Call, ...]) -> None:
    """Raise ValueError for more calls than a turn may have, and for one that cannot be kept as a dataset's row.

    vLLM's parsers take half of a character, NaN and any depth, which cannot be written as JSON and read again.
    """
    if len(calls) > MOST_CALLS:
        raise ValueError(f"the turn has {len(calls)} calls; expected at most {MOST_CALLS}")
    for call in calls:
        if flaw := flaw_of(vars(call)):
            raise ValueError(f"the call {flaw.partition(';')[0]}")
        json.dumps(call.arguments, allow_nan=False)
