"""Episodes that agent programs lead: real processes ask the gateway by HTTP; a server of a scripted model samples."""

import functools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stages.core.process_tree import living_processes
from stages.data.calculator import DEFINITION
from stages.data.files import Portion
from stages.hubs.builtin import qwen3_tools
from stages.kinds.generate.config import GenerateConfig
from stages.rollouts.acting import PlayedEpisode, play_all
from stages.rollouts.environments.environment import EnvironmentConfig
from stages.rollouts.environments.registry import AnyEnvironment
from stages.rollouts.prompts import read_prompts
from stages.serving.client import Client
from stages.serving.served_models import ServedModel
from tests.http_server import answering

QUESTION = "What is 12 * 34?"
TOOLS = json.dumps([DEFINITION])
LEFT_S = 10_000_000 + os.getpid()
"""Seconds that a process sleeps which an agent program leaves, by which it is known: no other test's sleeps as long."""
HEAD = """
import contextlib, json, os, socket, sys, time  # urllib.request takes five times as long as the rest of an agent

asked = json.loads(sys.stdin.readline())
row, URL, KEY = asked["row"], os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
TOOLS = json.loads(row["tools_of"])
first = {"role": "user", "content": row["prompt"]}

class Refused(Exception):
    pass

def post(body, key=KEY, path="/chat/completions"):
    connection = socket.create_connection(("127.0.0.1", int(URL.split(":")[2].split("/")[0])))
    head = f"POST /v1{path} HTTP/1.0\\r\\nAuthorization: Bearer {key}\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
    with contextlib.suppress(ConnectionError):  # a refusal may come before all is sent
        connection.sendall(head.encode() + body)
    answer = connection.makefile("rb")
    status = int(answer.readline().split()[1])
    while answer.readline().strip():
        pass
    if status != 200:
        raise Refused(status, json.load(answer)["error"]["code"])
    return answer

def ask(messages, **fields):
    return json.load(post(json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, **fields}).encode()))

def refused(messages, **fields):
    try:
        ask(messages, **fields)
    except Refused as error:
        return [*error.args]

def reward(value, **more):
    print(json.dumps({"reward": value, **more}))
"""


class Server:
    """Server of a model that says what a script says to a prompt."""

    served: ServedModel

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.asked: list[dict[str, Any]] = []
        self.script: Callable[[str], str] = lambda prompt: "408"

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(body)
        text = self.script(self.tokenizer.decode(body["prompt"]))
        ids = self.tokenizer.encode(f"{text}<|im_end|>")
        is_cut = len(ids) > body["max_tokens"]
        ids = ids[: body["max_tokens"]]
        log_probabilities = {"token_logprobs": [-0.5] * len(ids)}
        reason = "length" if is_cut else "stop"
        choice = {"text": text, "finish_reason": reason, "token_ids": ids, "logprobs": log_probabilities}
        return {"choices": [choice], "usage": {"completion_tokens": len(ids)}}


def calls_once(prompt: str) -> str:
    """Say the result of a tool, if the prompt has one; else call the calculator."""
    if given := re.findall(r"<tool_response>\n(.*)\n</tool_response>", prompt):
        return given[-1]
    call = {"name": "calculator", "arguments": {"expression": "12 * 34"}}
    return f"Let me see.<tool_call>\n{json.dumps(call)}\n</tool_call>"


@functools.cache
def _tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the models, whose training takes a second."""
    return qwen3_tools.make_tokenizer()


def make_model(folder: Path) -> Path:
    """Write the tokenizer and the config of a model without weights into a folder, and return it."""
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": tokenizer.eos_token_id}))
    return folder


@contextmanager
def scripted_server(folder: Path) -> Iterator[Server]:
    """Run a server of a scripted model, whose tokenizer lies in a folder."""
    state = Server(folder)
    with answering(state.answer) as url:
        state.served = ServedModel(Client(url, "key", "sft"), folder, 400, False)
        yield state


def environment(tmp_path: Path, body: str, **fields: Any) -> EnvironmentConfig:
    (tmp_path / "agent.py").write_text(HEAD + body)
    # without paths to packages, which are the half of Python's own start
    tree = {"program": "python -S agent.py", "files": [tmp_path / "agent.py"], **fields}
    return TypeAdapter(AnyEnvironment).validate_python(tree)


def play(server: Any, tmp_path: Path, body: str, num_samples: int = 1, **fields: Any) -> list[PlayedEpisode]:
    """Play episodes that a program leads, through the sampling client of stages that generate and evaluate."""
    config = environment(tmp_path, body, **fields)
    tree = {"kind": "generate", "model": "sft", "prompts": {"dataset": "a"}, "environment": config.model_dump()}
    read = GenerateConfig.model_validate({**tree, "num_samples": 2, "max_tokens": 64, "keep": "best"})
    (tmp_path / "sets").mkdir(exist_ok=True)
    row = {"prompt": QUESTION, "answer": "408", "tools_of": TOOLS, "task": 4}
    (tmp_path / "sets" / "a.jsonl").write_text(json.dumps(row) + "\n")
    assert read.environment
    prompts = read_prompts(
        tmp_path / "sets", replace(read.prompt_options, portion=Portion("training", "a")), server.served.folder
    )
    before, kept = {*living_processes()}, tmp_path / "kept"
    kept.unlink(missing_ok=True)
    try:
        options = replace(read.sampling_options, num_samples=num_samples)
        return play_all(server.served, prompts, read.environment, options, kept, print, print)
    finally:
        deadline_s = time.monotonic() + 5
        while children() - before and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not children() - before and not (tmp_path / "agents").exists()
        assert "gateway" not in {thread.name for thread in threading.enumerate()}


def children() -> set[int]:
    return {pid for pid, (parent, _) in living_processes().items() if parent == os.getpid()}


def left_processes() -> list[int]:
    """Return the processes that sleep for `LEFT_S`, and have not ended."""
    return [pid for pid in living_processes() if f"sleep\0{LEFT_S}\0" in command_of(pid)]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
