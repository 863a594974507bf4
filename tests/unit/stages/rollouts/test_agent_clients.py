"""OpenAI's own client and verifiers lead episodes as agent programs, in an environment of theirs (`make verifiers`).

`make test` covers what they send by HTTP, as it was recorded, in `test_programs.py`.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent_episodes import Server, calls_once, make_model, play, scripted_server

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[4]
PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
OPENAI = """
import openai

client = openai.OpenAI()
assert [model.id for model in client.models.list()] == ["policy"] == [client.models.retrieve("policy").id]
messages = [{"role": "developer", "content": "Calculate."}]
messages.append({"role": "user", "content": [{"type": "text", "text": row["prompt"]}]})
options = {"model": "policy", "tools": TOOLS}
answer = client.chat.completions.create(
    messages=messages, tool_choice="auto", max_completion_tokens=64, n=1, user="me", **options
)
(call,) = answer.choices[0].message.tool_calls
assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
messages.append(answer.choices[0].message)
result = [{"type": "text", "text": str(eval(json.loads(call.function.arguments)["expression"]))}]
messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
for unsupported in ({"n": 2}, {"logprobs": True}, {"tool_choice": "required"}, {"reasoning_effort": "low"}):
    try:
        client.chat.completions.create(messages=messages, **options, **unsupported)
    except openai.BadRequestError as error:
        assert error.code == "unsupported_parameter" and f"`{[*unsupported][0]}`" in error.message
with client.chat.completions.stream(
    messages=messages, stream_options={"include_usage": True}, **options
) as stream:
    for _ in stream:
        pass
    final = stream.get_final_completion()
messages += [final.choices[0].message, {"role": "user", "content": "So?"}]
assert final.usage.prompt_tokens > answer.usage.total_tokens
# the server takes a second: the client gives up waiting, and asks again
last = client.with_options(timeout=0.5, max_retries=5).chat.completions.create(messages=messages, **options)
messages += [last.choices[0].message, {"role": "user", "content": "Once more."}]
try:
    client.chat.completions.create(messages=messages, **options)
except openai.BadRequestError as error:
    assert error.code == "context_length_exceeded"
reward(float(final.choices[0].message.content == row["answer"] == last.choices[0].message.content))
"""
TASKSET = '''
import verifiers.v1 as vf

__all__ = ["Sums"]


class Data(vf.TaskData):
    answer: str


class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    def calculator(self, expression: str) -> str:
        """Calculate."""
        return str(eval(expression, {"__builtins__": {}}))


class Sum(vf.Task[Data]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class Sums(vf.Taskset[Sum]):
    def load(self):
        for number in range(30, 40):
            system = "Calculate."
            yield Sum(Data(prompt=f"What is 12 * {number}?", answer=str(12 * number), system_prompt=system))


if __name__ == "__main__":
    Calculator.run()
'''


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "model").mkdir()
    with scripted_server(make_model(tmp_path / "model")) as state:
        state.script = calls_once
        yield state


def test_openai_s_client_leads_an_episode(server: Server, tmp_path: Path) -> None:
    def script(prompt: str) -> str:
        if "So?" in prompt:
            time.sleep(1.2)
        return calls_once(prompt)

    server.script = script
    (episode,) = play(server, tmp_path, OPENAI, program=f"{PYTHON} agent.py", max_turns=3)
    assert (episode.reward, episode.end, episode.metrics["turns"]) == (1.0, "turns", 3.0)
    assert [message["role"] for message in episode.asked] == ["system", "user"]
    assert [message["role"] for message in episode.answer] == ["assistant", "tool", "assistant", "user", "assistant"]
    assert episode.metrics["refused_requests"] == 5.0, "four that are not supported, and that at the bound"


def test_verifiers_plays_a_task_with_tools(server: Server, tmp_path: Path) -> None:
    """Its harness, its interception server and its tool server are processes of the agent's, on ports of theirs."""
    folder = tmp_path / "agent"
    folder.mkdir()
    shutil.copy(ROOT / "configs" / "agents" / "verifiers_agent.py", folder)
    (folder / "sums.py").write_text(TASKSET)
    program = {"program": f"{PYTHON} verifiers_agent.py sums", "files": [folder], "metrics": ["turns"]}
    (episode,) = play(server, tmp_path, "", own_servers=True, **program)
    assert (episode.reward, episode.end, episode.metrics["program_turns"]) == (1.0, "done", 2.0)
    assert [message["role"] for message in episode.asked] == ["system", "user"]
    assert [message["role"] for message in episode.answer] == ["assistant", "tool", "assistant"]
    assert episode.metrics["refused_requests"] == 0.0 and not [*Path("/tmp").glob("vf-*")]
