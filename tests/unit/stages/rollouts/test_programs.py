"""Agent programs lead episodes: real processes ask the gateway by HTTP, and a server of a scripted model samples.

The oracle of token ids is Transformers, which renders and tokenizes a program's whole conversation at once.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from stages.core.errors import DataError
from stages.core.process_tree import descendants, living_processes, wait_for_end
from stages.data.calculator import DEFINITION
from stages.data.messages import Conversation, make_message
from stages.kinds.generate.config import GenerateConfig
from stages.rewards import code_program
from stages.rollouts.asking import request_seed
from stages.rollouts.environments import agent_process, led
from stages.rollouts.environments.environment import Action, Step
from tests.agent_episodes import (
    LEFT_S,
    QUESTION,
    TOOLS,
    Server,
    calls_once,
    command_of,
    environment,
    left_processes,
    make_model,
    play,
    scripted_server,
)
from tests.serving import wait_for

RIGHT = 'reward(float(ask([first])["choices"][0]["message"]["content"] == row["answer"]))'
WITH_A_TOOL = """
messages = [{"role": "system", "content": "Calculate."}, first]
while True:
    message = ask(messages, tools=TOOLS, temperature=0.1)["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        expression = json.loads(call["function"]["arguments"])["expression"]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(eval(expression))})
print("noise")
reward(float(message["content"] == row["answer"]), metrics={"messages": len(messages)})
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with scripted_server(folder) as state:
        yield state


def test_a_program_s_episode_is_what_the_sampler_answered(server: Any, tmp_path: Path) -> None:
    (episode,) = play(server, tmp_path, RIGHT)
    assert (episode.reward, episode.end, episode.text) == (1.0, "done", "408")
    assert episode.prompt_ids == server.asked[0]["prompt"] and [one.author for one in episode.segments] == ["model"]
    assert server.tokenizer.decode(episode.segments[0].token_ids) == "408<|im_end|>"


def test_tools_of_a_program_are_called_token_in_token_out(server: Any, tmp_path: Path) -> None:
    server.script = calls_once
    for episode in play(server, tmp_path, WITH_A_TOOL, num_samples=3, num_together=2, metrics=["messages"]):
        assert episode.metrics["program_messages"] == 5.0
        assert (episode.reward, episode.end, episode.metrics["calls"]) == (1.0, "done", 1.0)
        function = {"name": "calculator", "arguments": {"expression": "12 * 34"}}
        call = {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"type": "function", "function": function}],
        }
        messages = [
            {"role": "system", "content": "Calculate."},
            {"role": "user", "content": QUESTION},
            call,
            {"role": "tool", "content": "408"},
        ]
        shown = server.tokenizer.apply_chat_template(
            messages, tools=[DEFINITION], tokenize=False, add_generation_prompt=True
        )
        after = [token for one in episode.segments[:2] for token in one.token_ids]
        assert [*episode.prompt_ids, *after] == server.tokenizer.encode(shown)
        assert [one.author for one in episode.segments] == ["model", "environment", "model"]
        assert episode.answer[0]["tool_calls"] and episode.asked[0]["role"] == "system"


STREAMED = """
events = post(json.dumps({"model": "policy", "messages": [first], "stream": True, "tools": TOOLS}).encode())
lines = [line.decode().strip() for line in events if line.strip()]
assert lines[-1] == "data: [DONE]", lines
chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
(call,) = (call for delta in deltas for call in delta.get("tool_calls", ()))
text = "".join(delta.get("content") or "" for delta in deltas)
said = {"role": "assistant", "content": [{"type": "text", "text": text}], "refusal": None}
said["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")}]
answer = {"role": "tool", "tool_call_id": call["id"], "content": "408"}
last = ask([first, said, answer, {"role": "user", "content": "So?"}], tools=TOOLS)
reward(chunks[-1]["choices"][0]["finish_reason"] == "tool_calls" and float(last["choices"][0]["message"]["content"]))
"""
CLIENTS = """
import http.client, urllib.request

def send(body, retries=0):
    # OpenAI's client sends these headers and fields; verifiers those and its own
    names = {"Async": "async:asyncio", "Lang": "python", "Retry-Count": str(retries), "Read-Timeout": "600"}
    headers = {f"X-Stainless-{name}": value for name, value in names.items()}
    headers |= {"X-Session-ID": "a", "Accept-Encoding": "gzip, deflate", "Authorization": f"Bearer {KEY}"}
    connection = http.client.HTTPConnection("127.0.0.1", int(URL.split(":")[2].split("/")[0]))
    connection.request("POST", "/v1/chat/completions", json.dumps({"model": "policy", "tools": TOOLS, **body}), headers)
    return connection

def streamed(connection):
    lines = [line.decode().strip() for line in connection.getresponse() if line.strip()]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

for path in ("models", "models/policy"):
    shown = json.load(urllib.request.urlopen(urllib.request.Request(
        f"{URL}/{path}", headers={"Authorization": f"Bearer {KEY}"}
    )))
    assert "policy" in (shown.get("id"), shown.get("data", [{}])[0].get("id"))
question = [{"type": "text", "text": row["prompt"]}]
messages = [{"role": "developer", "content": "Calculate."}, {"role": "user", "content": question}]
fields = {"tool_choice": "auto", "n": 1, "max_completion_tokens": 9, "store": False, "safety_identifier": "a"}
answer = json.load(send({"messages": messages, **fields}).getresponse())
usage = answer["usage"]
message = answer["choices"][0]["message"]
(call,) = message["tool_calls"]
messages.append({**message, "tool_calls": [{**call, "index": 0}], "refusal": None})
tool = {"role": "tool", "tool_call_id": call["id"], "name": "calculator", "content": [{"type": "text", "text": "408"}]}
messages.append(tool)
asked = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}}
hung_up = send(asked)
time.sleep(0.8)
hung_up.close()  # as a client that has waited too long, whose next request says that it is the second
found = streamed(send(asked, retries=1))
assert found == streamed(send(asked, retries=2)), "the answer is given again"
other = json.load(send({"messages": messages[:2]}, retries=1).getresponse())
assert refused(messages, tools=TOOLS)[0] == 400 and other["error"]["code"] == "invalid_request", other
assert found[-1]["choices"] == [] and "usage" not in found[-2]
assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
assert found[-1]["usage"]["prompt_tokens"] > usage["total_tokens"]
reward(float("".join(one["choices"][0]["delta"].get("content", "") for one in found[:-1])))
"""


def test_what_openai_s_client_and_verifiers_send_is_answered(server: Any, tmp_path: Path) -> None:
    """The clients themselves lead episodes in a nightly test, in `test_agent_clients.py`."""

    def script(prompt: str) -> str:
        time.sleep(2.0 if "tool_response" in prompt else 0.0)
        return calls_once(prompt)

    server.script = script
    (episode,) = play(server, tmp_path, CLIENTS)
    assert (episode.reward, episode.end, len(server.asked)) == (408.0, "done", 2), episode.failure
    assert [message["role"] for message in episode.asked + episode.answer] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert episode.metrics["refused_requests"] == 2.0


REFUSED = """
import threading
said, found = [], []
def attempt():
    try:
        said.append(ask([first])["choices"][0]["message"])
    except Refused as error:
        found.append([*error.args])
threads = [threading.Thread(target=attempt) for _ in range(2)]  # two at once, of which either may be the first
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
so = {"role": "user", "content": "So?"}
found.append(refused([first, {**said[0], "content": "409"}, so]))  # edits history
found.append(refused([{"role": "user", "content": "Another?"}]))  # begins another conversation
found.append(refused([first, said[0]]))  # nothing new
found.append(refused([first, said[0], {"role": "tool", "tool_call_id": "a", "content": "1"}]))  # of no call
found.append(refused([first, said[0], so], tools=TOOLS))
for name, value in (("n", 2), ("logprobs", True), ("stop", ["x"]), ("tool_choice", "required"), ("surprise", 1)):
    found.append(refused([first, said[0], so], **{name: value}))
found.append(refused([first, said[0], so], model="gpt-5"))
found.append(refused([first, said[0], {"role": "user", "content": "x" * 70_000}]))
bodies = [(b"x" * 100_000_000, {}), (b"[" * 100_000, {})]
for body, options in [*bodies, (b"{}", {"key": "wrong"}), (b"{}", {"path": "/embeddings"})]:
    try:
        post(body, **options)
    except Refused as error:
        found.append([*error.args])
last = ask([first, said[0], so], temperature=9, max_tokens=1, seed=3, n=1, user="me")
reward(float(last["choices"][0]["message"]["content"]))
print(json.dumps(found), file=sys.stderr)
if found != json.loads(row["expected"]):
    sys.exit(str(found))
"""
FOUND = [
    *([[400, "invalid_request"]] * 6),
    *([[400, "unsupported_parameter"]] * 5),
    [404, "model_not_found"],
    [400, "string_above_max_length"],
    [413, "request_too_large"],
    [400, "invalid_request"],
    [401, "invalid_api_key"],
    [404, "not_found"],
]


def test_streamed_answers_and_a_client_s_form_of_them_go_on(server: Any, tmp_path: Path) -> None:
    server.script = calls_once
    (episode,) = play(server, tmp_path, STREAMED)
    assert (episode.reward, episode.end) == (408.0, "done")
    assert [message["role"] for message in episode.answer] == ["assistant", "tool", "user", "assistant"]


def test_what_does_not_go_on_with_the_conversation_is_refused(server: Any, tmp_path: Path) -> None:
    def script(prompt: str) -> str:
        time.sleep(0.3)
        return "408"

    server.script = script
    body = REFUSED.replace('row["expected"]', repr(json.dumps(FOUND)))
    (episode,) = play(server, tmp_path, body)
    assert (episode.reward, episode.end, episode.metrics["turns"]) == (408.0, "done", 2.0)
    assert episode.metrics["refused_requests"] == len(FOUND) - 1, "but that with a wrong key, which is of no episode"
    assert all((body["temperature"], body["max_tokens"]) == (1.0, 64) for body in server.asked)


FAILING = {
    "raise KeyError('here')": "exit code 1: KeyError: 'here'",
    "print('rubbish')": "printed rubbish as its last line; expected finite numbers as in",
    """print('{"reward": NaN, "metrics": {"steps": 1}}')""": 'printed {"reward": NaN, "metrics": {"steps": 1}}',
    "reward(1)": 'expected finite numbers as in {"reward": 1.0, "metrics": {"steps": 0.5}}',
    "reward(True, metrics={'steps': 1})": 'printed {"reward": true',
    "while True: print('x' * 1_000_000)": "exit code -9: it printed more than 64 MiB",
    "x = bytearray(3 << 30)": "exit code 1: MemoryError",
}


def test_a_program_that_fails_ends_its_episode_with_one_sentence(server: Any, tmp_path: Path) -> None:
    config = environment(tmp_path, "ask([first])\nexec(row['body'])", memory_gib=1, metrics=["steps"])

    def failure(body: str) -> str:
        episode = make()
        prompt = episode.reset({"prompt": QUESTION, "tools_of": TOOLS, "body": body}, 0)
        assert isinstance(prompt, Conversation) and prompt.messages == [make_message("user", QUESTION)]
        step = episode.step(Action("408"))
        assert (step.reward, step.messages, episode.metrics["environment_failed"]) == (0.0, (), 1.0)
        return str(step.failure)

    with config.opened(tmp_path) as make, ThreadPoolExecutor(2) as pool:
        for found, expected in zip(pool.map(failure, FAILING), FAILING.values(), strict=True):
            assert expected in found and found.startswith("the program python -S agent.py ") and "\n" not in found
    for command, expected in (
        ("python agent.py", "exit code 0 before it asked"),
        ("no-such-program", "exit code 1 bef"),
    ):
        config = environment(tmp_path, "sys.exit(0)", program=command)
        with config.opened(tmp_path) as make, pytest.raises(DataError, match=expected):
            make().reset({"tools_of": TOOLS, "prompt": QUESTION}, 0)
    server.script = lambda prompt: "408"
    with pytest.raises(DataError, match="ended with exit code 3 before it asked"):
        body = f"if asked['seed'] != {request_seed(0, 0, 1)}: time.sleep(99)\nsys.exit(3)"
        play(server, tmp_path, body, num_samples=2)
    with pytest.raises(ValidationError, match="No closing quotation"):
        environment(tmp_path, "", program="python 'agent.py")


def test_programs_that_fail_in_a_row_end_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(led, "MOST_FAILURES", 2)
    body = "text = ask([first])['choices'][0]['message']['content']\nsys.exit(3) if text == '7' else reward(1)"
    with environment(tmp_path, body).opened(tmp_path) as make:

        def step(text: str) -> Step:
            episode = make()
            episode.reset({"prompt": QUESTION, "tools_of": TOOLS}, 0)
            return episode.step(Action(text))

        assert step("7").failure == "the program python -S agent.py ended with exit code 3"
        assert step("408") == Step((), 1.0, done=True), "from which on failures count again"
        assert step("7").failure
        with pytest.raises(DataError, match=r"^the program .* agent.py failed 2 episodes in a row, .* 3; fix it$"):
            step("7")


LOST = f"""
if not os.fork():  # in a session of its own, and not known by its environment
    os.setsid()
    os.execve("/bin/sleep", ["sleep", "{LEFT_S}"], {{}})
"""
AT_A_BOUND = """
messages = [first]
try:
    while True:
        answer = ask(messages)["choices"][0]
        messages += [answer["message"], {"role": "user", "content": "Again."}]
except Refused as error:
    assert error.args == (400, "context_length_exceeded"), error
reward(len(messages) + (answer["finish_reason"] == "length") / 2)
"""


def test_an_episode_ends_at_its_bounds(server: Any, tmp_path: Path) -> None:
    (episode,) = play(server, tmp_path, AT_A_BOUND, max_turns=3)
    assert (episode.end, episode.reward, episode.metrics["turns"], episode.truncated) == ("turns", 7.0, 3.0, True)
    server.script = lambda prompt: "408 " * 100
    (episode,) = play(server, tmp_path, AT_A_BOUND)
    assert (episode.end, episode.reward, episode.metrics["turns"]) == ("tokens", 3.5, 1.0)
    server.script = lambda prompt: "408"
    # of which the program's start takes a second on a busy machine
    began_s, most_s = time.monotonic(), 5.0
    (episode,) = play(server, tmp_path, f"ask([first])\n{LOST}\ntime.sleep(1000)", max_episode_s=most_s)
    assert not left_processes()
    assert (episode.end, episode.reward) == ("seconds", 0.0) and time.monotonic() - began_s < most_s + 8.5
    again = 'ask([first, ask([first])["choices"][0]["message"], first])'
    (episode,) = play(server, tmp_path, again, max_turns=1)
    assert (episode.end, episode.reward) == ("turns", 0.0), "it was refused a turn, and failed"


def test_a_kill_of_what_watches_a_program_fails_its_episode_and_leaves_nothing(server: Any, tmp_path: Path) -> None:
    """While the program waits for its turn, the process that was started for it is killed, and then the one below."""
    found: list[int] = []

    def script(prompt: str) -> str:
        wait_for(left_processes, what="what the program has started")
        watching = [pid for pid in descendants(os.getpid()) if agent_process.LAUNCHER in command_of(pid)]
        found.append(len(watching))
        if len(found) < 3:
            os.kill(watching[len(found) - 1], signal.SIGKILL)
        return "408"

    server.script = script
    body = f'{LOST}\nreward(float(ask([first])["choices"][0]["message"]["content"]))'
    played = play(server, tmp_path, body, num_samples=3, num_together=1)
    assert [(one.end, one.reward) for one in played] == [("failed", 0.0), ("failed", 0.0), ("done", 408.0)]
    assert [one.metrics["environment_failed"] for one in played] == [1.0, 1.0, 0.0]
    assert [str(one.failure).rpartition(" ended ")[2] for one in played[:2]] == ["with exit code -9"] * 2
    assert found == [2, 2, 2] and not left_processes()
    assert not {"agent", "gateway"} & {thread.name for thread in threading.enumerate()}


STAGE = """
import sys, time
from pathlib import Path
from stages.rollouts.environments.agent_process import AgentCommand, AgentProcess

folder = Path(sys.argv[1])
limits = {"memory_bytes": 1 << 30, "most_processes": 9, "own_servers": False, "readable": [str(folder)]}
command = AgentCommand(["python", "-S", "agent.py"], folder, folder / "homes", limits)
process = AgentProcess(command, 1, {}, {}, print)
time.sleep(1000)
"""


def test_a_kill_of_the_stage_s_process_ends_its_programs(tmp_path: Path) -> None:
    """Here no supervisor of the stage is above it, which would end all that is left."""
    (tmp_path / "homes").mkdir()
    (tmp_path / "agent.py").write_text(f"import os, time\n{LOST}\ntime.sleep(1000)")
    with subprocess.Popen([sys.executable, "-c", STAGE, tmp_path]) as stage:
        wait_for(left_processes, what="what the program starts")
        below = descendants(stage.pid)
        stage.kill()
    assert len(below) == 4, "two that watch, the program, and what it has started"
    wait_for_end(lambda: [pid for pid in below if pid in living_processes()], patience_s=10)
    assert not {*below} & {*living_processes()}


def test_the_content_of_a_program_s_files_identifies_what_it_makes(tmp_path: Path) -> None:
    tree = {"kind": "generate", "model": "sft", "prompts": {"dataset": "a"}, "num_samples": 2, "keep": "best"}
    fields = environment(tmp_path, RIGHT).model_dump()
    read = GenerateConfig.model_validate({**tree, "max_tokens": 64, "environment": fields})
    assert read.outside_paths()["environment.files.0"] == tmp_path / "agent.py"
    assert str(tmp_path) not in json.dumps(read.identity()) and "python -S agent.py" in json.dumps(read.identity())
    with pytest.raises(ValidationError, match="rewards"):
        GenerateConfig.model_validate({**tree, "max_tokens": 64, "environment": {**fields, "gives_reward": False}})


TWO_CALLS = """
message = ask([first], tools=TOOLS)["choices"][0]["message"]
answers = [{"role": "tool", "tool_call_id": call["id"], "content": "408"} for call in message["tool_calls"]]
reward(float(len(answers) == 2 and refused([first, message, *answers], tools=TOOLS)[0] == 400))
"""


def test_messages_that_the_template_refuses_end_an_episode(server: Any, folder: Path, tmp_path: Path) -> None:
    """Llama 3's template, for one, shows a single call in a turn."""
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    template = model / "chat_template.jinja"
    once = "{%- for m in messages %}{%- if m.tool_calls and m.tool_calls|length > 1 %}"
    template.write_text(
        f"{once}{{{{ raise_exception('one call') }}}}{{%- endif %}}{{%- endfor %}}{template.read_text()}"
    )
    server.served = replace(server.served, folder=model)
    call = calls_once("").removeprefix("Let me see.")
    server.script = lambda prompt: f"{call}\n{call}"
    (episode,) = play(server, tmp_path, TWO_CALLS, num_samples=1)
    assert (episode.end, episode.reward, episode.truncated) == ("template", 1.0, True)
    assert [one.author for one in episode.segments] == ["model"]


CONFINED = """
import socket, subprocess
ask([first])
found = []
for attempt in (
    lambda: socket.create_connection(("127.0.0.1", PORT)),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    lambda: socket.socket(socket.AF_UNIX),
    lambda: open("secret").read(),
    lambda: open("new", "w"),
    lambda: open(f"/proc/{os.getppid()}/environ").read(),
    lambda: os.kill(os.getppid(), 0),
):
    try:
        attempt()
        found.append("done")
    except PermissionError:
        found.append("refused")
with open(os.path.join(os.environ["HOME"], "own"), "w") as own:
    own.write("mine")
subprocess.Popen(["sleep", "LEFT_S"], start_new_session=True)
reward(found.count("refused"), metrics={"found": 1})
"""


@pytest.mark.skipif(code_program.landlock_version() < 6, reason="Landlock keeps from ports and signals from Linux 6.12")
def test_a_program_reaches_the_gateway_alone_and_leaves_nothing(server: Any, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    port = server.served.client.url.rpartition(":")[2]
    (episode,) = play(server, tmp_path, CONFINED.replace("PORT", port).replace("LEFT_S", str(LEFT_S)))
    assert (episode.reward, episode.end) == (7.0, "done")
    assert not (tmp_path / "new").exists()
    assert not left_processes()
