"""Program that asks vLLM's own parsers for the calls of tools in texts, run by the Python of vLLM's environment.

    .venv-serve/bin/python tests/unit/stages/rollouts/vllm_calls.py TOKENIZER < QUESTIONS

A question is {"form": …, "tools": […], "texts": […]}; all are one JSON list, and so are the answers: for each text a
list of [name, arguments], empty where vLLM gives the text back.
"""

import json
import logging
import sys
from typing import Any

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager


def calls(form: str, tools: list[dict[str, Any]], texts: list[str], tokenizer: Any) -> list[list[list[Any]]]:
    """Return the calls that vLLM's parser of a form finds in each text."""
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "q"}], tools=tools)
    parser = ToolParserManager.get_tool_parser(form)
    answers = []
    for text in texts:
        found = parser(tokenizer, request.tools).extract_tool_calls(text, request)
        answers.append([[one.function.name, json.loads(one.function.arguments)] for one in found.tool_calls])
    return answers


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # a traceback for each malformed call
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    answers = [calls(**question, tokenizer=tokenizer) for question in json.load(sys.stdin)]
    print("\n" + json.dumps(answers))
