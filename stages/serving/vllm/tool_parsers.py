"""Parsers by which vLLM reads tool calls from answers, chosen from the model's chat template.

Without one, vLLM refuses requests with tools. A template writes calls of earlier turns as the model writes new ones, so
the texts around them identify the parser.
"""

import ast
import difflib
from functools import cache
from pathlib import Path
from typing import Any

from stages.core.files import read_json_object
from stages.models.model_folder import tokens_of

DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
MARKERS: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (("<｜DSML｜",), "deepseek_v32", ()),
    (("tool▁calls▁begin", "```json"), "deepseek_v3", DEEPSEEK),
    (("tool▁calls▁begin",), "deepseek_v31", DEEPSEEK),
    (("<|tool_calls_section_begin|>",), "kimi_k2", ()),
    (("[TOOL_CALLS]",), "mistral", ("[TOOL_CALLS]",)),
    (("<longcat_tool_call>",), "longcat", ()),
    (("<minimax:tool_call>",), "minimax_m2", ()),
    (("<seed:tool_call>",), "seed_oss", ()),
    (("<dots_function_call>",), "dots", ()),
    (("<ifm|tool_calls>",), "k2_horizon", ()),
    (("<atem:function_calls>",), "muse_glimmer", ()),
    (("<start_function_call>",), "functiongemma", ()),
    (("<|tool_call>",), "gemma4", ()),
    (("<|tool_call_start|>",), "lfm2", ("<|tool_call_start|>", "<|tool_call_end|>")),
    (("<|tool_list_start|>",), "lfm2", ("<|tool_call_start|>", "<|tool_call_end|>")),
    (("<|tools_prefix|>",), "apertus", ()),
    (("<|action_start|>",), "internlm", ()),
    (("<｜tool_calls_begin｜>",), "step3", ()),
    (("<function_calls>",), "olmo3", ()),
    (("<function=",), "qwen3_coder", ()),
    (("<arg_key>",), "glm45", ()),
    (("<tool_call>",), "hermes", ()),
    (("<tool_calls>",), "jamba", ("<tool_calls>", "</tool_calls>")),
    (("<|python_tag|>",), "llama3_json", ("<|python_tag|>",)),
    # Llama 3.2's, whose template asks for the same calls and writes them without a tag.
    (('"parameters": dictionary of argument name',), "llama3_json", ("<|python_tag|>",)),
    (("<|/tool|>",), "phi4_mini_json", ()),
    (("<|tool_call|>",), "granite", ()),
    (("<|start|>functions.",), "openai", ()),
)
"""Tool call parsers in the order in which they are tried: texts that a template must all contain, name, needed tokens.

Without those tokens a parser raises at each request. The first row that fits counts: `<tool_call>` alone means JSON,
but it also stands around other forms of calls."""


def parser_of(model: Path, python: Path) -> str | None:
    """Return vLLM's tool call parser for a model's chat template, or None. python: of vLLM's environment."""
    template = _templates(model)
    known = known_parsers(python)
    for texts, parser, needed in MARKERS:
        if all(text in template for text in texts):
            has_tokens = not needed or (tokens := tokens_of(model)) is None or tokens.keys() >= {*needed}
            return parser if has_tokens and (known is None or parser in known) else None
    return None


def parser_problem(name: Any, python: Path) -> str | None:
    """Return an error if vLLM has no tool call parser of this name, else None."""
    known = known_parsers(python)
    if known is None or name in known:
        return None
    close = difflib.get_close_matches(str(name), known, n=2)
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    return f"vLLM has no such parser; {meant}It has {', '.join(sorted(known))}"


@cache
def known_parsers(python: Path) -> frozenset[str] | None:
    """Return the installed vLLM's tool call parsers, read from its source, as an import takes seconds; or None."""
    for file in python.parent.parent.glob("lib/python3*/site-packages/vllm/tool_parsers/__init__.py"):
        for statement in ast.parse(file.read_text("utf-8")).body:
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
                keys = [key.value for key in statement.value.keys if isinstance(key, ast.Constant)]
                names = frozenset(key for key in keys if isinstance(key, str))
                if "hermes" in names:
                    return names
    return None


def _templates(model: Path) -> str:
    """Return all chat templates of a model folder joined into one text; some models have a second one for tools."""
    files = [model / "chat_template.jinja", *sorted((model / "additional_chat_templates").glob("*.jinja"))]
    texts = [file.read_text("utf-8", errors="replace") for file in files if file.is_file()]
    config = model / "tokenizer_config.json"
    named = read_json_object(config).get("chat_template") if config.is_file() else None
    for entry in named if isinstance(named, list) else [named]:
        text = entry.get("template") if isinstance(entry, dict) else entry
        texts += [text] if isinstance(text, str) else []
    return "\n".join(texts)
