"""Formats in which models write calls of tools, recognised in their chat templates and named as vLLM's parsers are.

A template writes calls of earlier turns as the model writes new ones, so the texts around them identify the format.
"""

from collections.abc import Container
from pathlib import Path

from stages.core.files import read_json_object

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
"""Formats in the order in which they are tried: texts that a template must all contain, name, needed tokens.

Without those tokens a parser raises at each request. The first row that fits counts: `<tool_call>` alone means JSON,
but it also stands around other forms of calls."""


def call_format(template: str, tokens: Container[str] | None) -> str | None:
    """Return the format of the calls that a chat template writes, or None. tokens: of the tokenizer, if known."""
    for texts, name, needed in MARKERS:
        if all(text in template for text in texts):
            return name if tokens is None or all(token in tokens for token in needed) else None
    return None


def templates_of(model: Path) -> str:
    """Return all chat templates of a model folder joined into one text; some models have a second one for tools."""
    files = [model / "chat_template.jinja", *sorted((model / "additional_chat_templates").glob("*.jinja"))]
    texts = [file.read_text("utf-8", errors="replace") for file in files if file.is_file()]
    config = model / "tokenizer_config.json"
    named = read_json_object(config).get("chat_template") if config.is_file() else None
    for entry in named if isinstance(named, list) else [named]:
        text = entry.get("template") if isinstance(entry, dict) else entry
        texts += [text] if isinstance(text, str) else []
    return "\n".join(texts)
