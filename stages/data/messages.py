"""Checked messages, tool calls and tool definitions of a conversation, in the form that chat templates expect.

A message has a `role` and `content`. An assistant's may also have thoughts (`reasoning_content` or `thinking`, a
string) and, even without content, `tool_calls`, a list of {type: function, function: {name, arguments}}, or the inner
object; messages of the role `tool` hold the results. Where a conversation has media, a content may be a list of parts,
{type: text, text} and {type: image}. A row's documents are a `Conversation`, which a chat template renders, or
`PlainText`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from stages.data.json_values import DECODER, flaw_of
from stages.data.media_reference import MediaKind, MediaReference

Message = dict[str, Any]
Tool = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
}
THOUGHTS = ("reasoning_content", "thinking")
TOOL_ANSWER_FIELDS = ("name", "tool_call_id")
TOOL_FIELDS = ("type", "function")
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
"""Fields of a tool's definition in OpenAI's API, in the order in which vLLM passes them to chat templates."""
MESSAGE_FIELDS = (
    "role",
    "content",
    "from",
    "value",
    "loss",
    "loss_scale",
    "loss_weight",
    "weight",
    "train",
    *THOUGHTS,
    "tool_calls",
    "tool_call_id",
)
"""Fields of a message that are used in some format or role; others are reported as ignored."""
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning": "reasoning",
    "tool_call": "tool_call",
}
"""Meaning of the types of text parts in a message's content list; `reasoning` and `tool_call` are LLaMA-Factory's."""
MEDIA_PARTS: dict[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""Types of the parts that stand for media (OpenAI's and Hugging Face's names), with the kind of each."""
UNREAD_OF_PART = ("type", "text", "detail", "uuid", "cache_control")
"""Keys of a media part that change nothing of what a model here is shown."""
SOURCE, INDEX = "source", "index"
"""Keys of a media part until the row's media are found: its own payload, else the number, from 0, of the row's medium.

A part without either takes the row's next."""
INVISIBLE = "[\u00ad\u200b-\u200f\u2060-\u2064\ufeff]"
"""Pattern of characters that show nothing and have no width, but are not white space."""
Span = tuple[int, int]
"""Span of characters in a text: begin (inclusive) and end (exclusive)."""


class RowError(ValueError):
    """Raised for a bad row; the message follows the row's place to one sentence: "train.jsonl:17 …"."""


@dataclass(frozen=True)
class Conversation:
    """Conversation of a dataset row, with its tools and the messages that carry loss, ready for a chat template.

    num_prompt_messages: number of first messages that carry no loss, in whatever role. unlearned: positions, from 0, of
    further messages without loss, as the row says.
    """

    messages: list[Message]
    num_prompt_messages: int = 0
    tools: tuple[Tool, ...] = ()
    unlearned: frozenset[int] = frozenset()
    variables: dict[str, Any] = field(default_factory=dict)
    """Variables that the row sets for the chat template, such as {"enable_thinking": false}."""
    media: tuple[MediaReference, ...] = ()
    """Media of the row, in the order of the parts that stand for them in the messages."""

    @property
    def learned_turns(self) -> list[int]:
        """Indices of the assistant's messages that carry loss."""
        return [
            number
            for number, message in enumerate(self.messages)
            if message["role"] == "assistant" and number >= self.num_prompt_messages and number not in self.unlearned
        ]

    def before(self, number: int) -> Conversation:
        """Return the conversation before a given message, without loss: the prompt that this message answers."""
        messages = self.messages[:number]
        media = self.media[: num_media(messages)]
        return replace(self, messages=messages, num_prompt_messages=0, unlearned=frozenset(), media=media)

    def num_media_before_turns(self) -> dict[int, int]:
        """Return how many media stand before each answer that is learned, by the message's index."""
        return {number: num_media(self.messages[:number]) for number in self.learned_turns}


@dataclass(frozen=True)
class PlainText:
    """Plain text of a row, used without a chat template; the loss is on the completion and the end-of-text token."""

    prompt: str
    completion: str


Document = Conversation | PlainText


def answers_of(document: Document) -> Iterator[str]:
    """Yield the text of each answer that is learned from, except answers that only call tools."""
    if isinstance(document, PlainText):
        yield document.completion
        return
    for message in document.messages[document.num_prompt_messages :]:
        if message["role"] == "assistant" and "tool_calls" not in message:
            yield message["content"]


def fields_of(document: Document) -> dict[str, Any]:
    """Return a document's fields as JSON values, to compare and hash it; media are there only where it has some."""
    fields = {name: value for name, value in vars(document).items() if name != "media"}
    media = document.media if isinstance(document, Conversation) else ()
    return fields | {"media": [one.sha256 for one in media]} if media else fields


def texts_of(message: Message) -> list[str]:
    """Return the texts of a message's content: one, none for null, or those of its parts between media."""
    content = message["content"]
    if isinstance(content, list):
        return [part["text"] for part in content if part["type"] == "text"]
    return [content] if content else []


def in_parts(message: Message) -> Message:
    """Return a message whose content is a list of parts, as vLLM gives it to templates that iterate over contents."""
    content = message["content"]
    return (
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) and content else message
    )


def num_media(messages: list[Message]) -> int:
    """Return the number of parts that stand for media in the messages."""
    return sum(len(one["content"]) - len(texts_of(one)) for one in messages if isinstance(one["content"], list))


def as_messages(value: object, column: str, role: str) -> list[Message]:
    """Return a column's value as checked messages, a string as one of the given role; raise RowError."""
    return [make_message(role, parse_text(value, column))] if isinstance(value, str) else parse_messages(value, column)


def parse_messages(
    value: object,
    column: str,
    keys: tuple[str, str] = ("role", "content"),
    roles: dict[str, str] | None = None,
) -> list[Message]:
    """Return the messages in a column, each checked alone; the order of roles is not checked. Raises RowError."""
    if not isinstance(value, list):
        raise RowError(f"has {kind_of(value)} in `{column}`; expected a list of messages {{{', '.join(keys)}}}")
    if not value:
        raise RowError(f"has an empty list in `{column}`; expected messages")
    named = roles or {role: role for role in ROLES}
    return [_checked(item, f"message {number} of `{column}`", keys, named) for number, item in enumerate(value, 1)]


def ordered(messages: list[Message]) -> list[Message]:
    """Return the messages if roles alternate: an optional `system`, then `user` and, last, `assistant` in turn.

    After an assistant's tool calls come answers of the role `tool`, and then the assistant again. Raises RowError.
    """
    first = int(messages[0]["role"] == "system")
    if not any(message["role"] == "assistant" for message in messages[first:]):
        raise RowError("has no assistant turn, so there is nothing to learn; expected at least one")
    allowed: tuple[str, ...] = ("user",)
    for position, message in enumerate(messages[first:], first + 1):
        if message["role"] not in allowed:
            expected = " or ".join(f"`{role}`" for role in allowed)
            raise RowError(
                f"has `{message['role']}` in message {position} where {expected} was expected; user and assistant "
                "take turns, after at most one system message, and `tool` answers the assistant's tool calls"
            )
        allowed = _next_roles(message)
    if messages[-1]["role"] != "assistant":
        raise RowError(f"ends with a `{messages[-1]['role']}` message; expected the assistant's answer to be the last")
    return messages


def parse_text(value: object, column: str) -> str:
    """Return the value of a column if it is a string that is not blank. Raises RowError."""
    if not isinstance(value, str):
        raise RowError(f"has {kind_of(value)} in `{column}`; expected a string")
    if not value.strip():
        raise RowError(f"has an empty `{column}`; expected text")
    return value


def decoded(value: object) -> object:
    """Return the value that a JSON text encodes. Anything else, such as plain text, is returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        content = DECODER.decode(value)
    except json.JSONDecodeError:
        return value
    except RecursionError as error:
        raise RowError("holds JSON text that is nested too deeply to be read") from error
    if flaw := flaw_of(content):
        raise RowError(f"{flaw}, within JSON text")
    return content


def parse_tools(row: dict[str, Any]) -> tuple[Tool, ...]:
    """Return the tool definitions of a row's column `tools`, in the form that a server gives to the chat template.

    Objects, or the same as JSON text: {type: function, function: {name, description, parameters}}, or the inner object
    alone.
    """
    return tuple(_tool(tool, f"tool {number} of `tools`") for number, tool in enumerate(listed_tools(row), 1))


def listed_tools(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the unchanged objects of a row's column `tools`, decoded if they are JSON text. Raises RowError."""
    tools = decoded(row.get("tools"))
    if tools is None or tools == "":
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"has {kind_of(tools)} in `tools`; expected a list of objects that define functions")
    check_json(tools, "`tools`")
    return tools


def make_message(role: str, content: str) -> Message:
    """Return a chat message that has only a role and a text."""
    return {"role": role, "content": content}


def renamed(message: Message, known_thoughts: list[str]) -> Message:
    """Return the message with its reasoning moved to the field name that the chat template reads."""
    return {
        known_thoughts[0] if key in THOUGHTS and key not in known_thoughts else key: value
        for key, value in message.items()
    }


def with_calls_as(message: Message, arguments_as_text: bool, empty_as_null: bool) -> Message:
    """Return a message whose tool calls have a chat template's form (arguments as JSON text, null as content)."""
    calls = message["tool_calls"]
    if arguments_as_text:
        calls = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for call in calls
        ]
    content = None if empty_as_null and not message["content"] else message["content"]
    return {**message, "content": content, "tool_calls": calls}


def kind_of(value: object) -> str:
    """Return a JSON value's type in words for error messages, such as "a string"."""
    kinds = {str: "a string", list: "a list", dict: "an object", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")


def listed(columns: dict[str, Any] | tuple[str, ...] | list[str]) -> str:
    """Return column names as a comma-separated list for error messages."""
    return ", ".join(f"`{column}`" for column in columns) or "no columns"


def check_json(value: object, name: str) -> None:
    """Raise RowError for a value that cannot be written as JSON, such as NaN, infinity or a Parquet date."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RowError(f"has what is no JSON in {name}: {error}; expected numbers, text, lists and objects") from error


def _checked(item: object, name: str, keys: tuple[str, str], roles: dict[str, str]) -> Message:
    role_key, content_key = keys
    item = _without_parts(item, content_key, name)
    has_calls = isinstance(item, dict) and bool(item.get("tool_calls"))
    needed = {role_key} if has_calls else {role_key, content_key}
    if not isinstance(item, dict) or not needed <= item.keys():
        found = listed(item) if isinstance(item, dict) else kind_of(item)
        raise RowError(f"has {found} as {name}; expected an object with {listed(keys)}")
    role = item[role_key]
    if not isinstance(role, str) or role not in roles:
        raise RowError(f"has the unknown role {role!r} in {name}; expected {', '.join(roles)}")
    content = item.get(content_key)
    if has_calls and content is None:
        content = ""
    if isinstance(content, list):
        if roles[role] == "assistant":
            raise RowError(
                f"has media in {name}, of the assistant; expected text: models here read media, and write text"
            )
        return {"role": roles[role], "content": content, **_extras(item, roles[role], name)}
    if not isinstance(content, str):
        raise RowError(f"has {kind_of(content)} as `{content_key}` of {name}; expected a string")
    may_be_empty = has_calls or roles[role] in ("system", "tool")
    if not may_be_empty and not content.strip():
        raise RowError(f"has an empty `{content_key}` in {name}; expected text")
    return {**make_message(roles[role], content), **_extras(item, roles[role], name)}


def _tool(tool: dict[str, Any], name: str) -> Tool:
    """Return a tool definition in the form that vLLM passes to chat templates: fields in order, null if missing.

    Templates write definitions as JSON: with another order of fields, or without the outer object, the model would be
    asked with another prompt than it was trained with.
    """
    function = decoded(tool.get("function", tool))
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
        raise RowError(
            f"has no function name in {name}; expected {{type: function, function: {{name, description, parameters}}}}"
        )
    description, parameters = function.get("description"), decoded(function.get("parameters"))
    if not isinstance(description, str | None):
        raise RowError(f"has {kind_of(description)} as `description` of {name}; expected a string")
    if not isinstance(parameters, dict | None):
        raise RowError(f"has {kind_of(parameters)} as `parameters` of {name}; expected an object, or it as JSON text")
    strict = {} if function.get("strict") is None else {"strict": function["strict"]}
    definition = {"name": function["name"], "description": description, "parameters": parameters, **strict}
    return {"type": "function", "function": definition}


def _next_roles(message: Message) -> tuple[str, ...]:
    """Return the roles that may follow a given chat message, such as `tool` after a tool call."""
    if message["role"] == "assistant":
        return ("tool",) if "tool_calls" in message else ("user",)
    return ("tool", "assistant") if message["role"] == "tool" else ("assistant",)


def _without_parts(item: object, content_key: str, name: str) -> object:
    """Return the message with its list of content parts (OpenAI's form) joined into one text, if all are texts.

    Parts are {type: text, text}, or LLaMA-Factory's {type, value}, also of thoughts and calls. With media among them
    they stay a list, of {type: text, text} and {type: image, source}.
    """
    parts = item.get(content_key) if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(parts, list):
        return item
    where = f"`{content_key}` of {name}"
    types = {str(part.get("type")) for part in parts if isinstance(part, dict)}
    if others := sorted(types - TEXT_PARTS.keys() - MEDIA_PARTS.keys()):
        raise RowError(
            f"has {', '.join(others)} in {where}; expected parts of the types text and {listed(MEDIA_PARTS)}"
        )
    if types & MEDIA_PARTS.keys():
        return {**item, content_key: [_media_or_text(part, where) for part in parts]}
    texts: dict[str, list[str]] = {kind: [] for kind in TEXT_PARTS.values()}
    for part in parts:
        text = next((part[key] for key in ("text", "value") if key in part), None) if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise RowError(f"has a list as {where}; expected a string, or a list of {{type: text, text}}")
        texts[TEXT_PARTS[part["type"]]].append(text)
    extras: Message = {}
    if texts["reasoning"]:
        extras["reasoning_content"] = "".join(texts["reasoning"])
    if texts["tool_call"]:
        calls = [decoded(call) for call in texts["tool_call"]]
        extras["tool_calls"] = [one for call in calls for one in (call if isinstance(call, list) else [call])]
    return {**item, content_key: "".join(texts["text"]), **extras}


def _media_or_text(part: object, where: str) -> dict[str, Any]:
    """Return a part of a content list with media, as {type: text, text} or {type: KIND, source}. Raises RowError."""
    kind = MEDIA_PARTS.get(str(part.get("type"))) if isinstance(part, dict) else None
    if isinstance(part, dict) and kind:
        keys = (part["type"], kind, f"{kind}_url", "url", "path", "data", "bytes", "value")
        set_keys = [key for key, value in part.items() if value is not None and key not in (*UNREAD_OF_PART, INDEX)]
        if unread := [key for key in set_keys if key not in keys]:
            raise RowError(
                f"has {listed(unread)} in a part of {where} for {kind}, which is not read here, where a model is shown "
                f"media as `media` of its stage says; expected {listed(tuple(dict.fromkeys(keys)))}"
            )
        own = next((part[key] for key in keys if key in set_keys), None)
        return {"type": kind, SOURCE: own, INDEX: part.get(INDEX)}
    text = next((part[key] for key in ("text", "value") if key in part), None) if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise RowError(f"has {kind_of(part)} without text in {where}; expected {{type: text, text}}, or media")
    return {"type": "text", "text": text}


def _extras(item: dict[str, Any], role: str, name: str) -> Message:
    """Return a message's reasoning, tool calls and tool-result fields; raise RowError for those of a wrong role."""
    extras = {key: item[key] for key in (*THOUGHTS, "tool_calls") if item.get(key)}
    if extras and role != "assistant":
        raise RowError(f"has {listed(extras)} in {name}, of the role `{role}`; expected it from the assistant only")
    for key in THOUGHTS:
        if not isinstance(extras.get(key, ""), str):
            raise RowError(f"has {kind_of(extras[key])} as `{key}` of {name}; expected a string")
    if "tool_calls" in extras:
        extras["tool_calls"] = _tool_calls(extras["tool_calls"], name)
    if role == "tool":
        extras |= {key: item[key] for key in TOOL_ANSWER_FIELDS if isinstance(item.get(key), str)}
    return extras


def _tool_calls(value: object, name: str) -> list[dict[str, Any]]:
    calls = decoded(value)
    if not isinstance(calls, list):
        raise RowError(f"has {kind_of(calls)} as `tool_calls` of {name}; expected a list")
    return [_tool_call(call, f"tool call {number} of {name}") for number, call in enumerate(calls, 1)]


def _tool_call(call: object, name: str) -> dict[str, Any]:
    """Return a tool call in OpenAI's form, except that its arguments are an object and not JSON text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowError(f"has no function name in {name}; expected {{function: {{name, arguments}}}}")
    arguments = decoded(function.get("arguments", {}))
    if not isinstance(arguments, dict):
        raise RowError(
            f"has {kind_of(arguments)} as `arguments` of {name}; expected an object, or the same as JSON text"
        )
    check_json(arguments, f"`arguments` of {name}")
    assert isinstance(call, dict)
    identifier = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**identifier, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
