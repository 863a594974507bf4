"""Agent program that plays a task of a `verifiers` 0.4 taskset: `python verifiers_agent.py TASKSET`.

TASKSET is an importable module. Standard input is a JSON line whose `row` has the task's number as `task`. The last
line that it prints has the sum of the task's rewards. OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL name the model.
"""

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1 import runtimes
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.utils.loaders import load_taskset

FOLDER = str(Path(__file__).parent)
PORT_FILES = "/tmp/vf-port-"  # noqa: S108 - where verifiers has tool servers write, which this program may not


def at_home(path):
    """Return the place of a file in this program's home folder, if it is a tool server's."""
    return path.replace(PORT_FILES, f"{Path.home()}/vf-port-")


class HomeRuntime(SubprocessRuntime):
    """Processes of this environment, which install nothing and write to the home folder alone."""

    async def prepare_uv_script(self, script, env=None, *, activate=True):
        return [sys.executable, "-c", script]

    async def run_background(self, argv, env, log):
        own = {name: at_home(value) for name, value in env.items()}
        await super().run_background(argv, {**own, "PYTHONPATH": FOLDER}, log)

    async def _read(self, path, max_bytes=None):
        return await super()._read(at_home(path), max_bytes)


async def play(taskset, number):
    """Let the model solve a task, and return verifiers' record of it."""
    tasks = load_taskset(vf.TasksetConfig(id=taskset))
    task = next(itertools.islice(tasks, number, None))
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    runtime, harness = vf.SubprocessConfig(), {"id": "null"}
    config = vf.AgentConfig(model=os.environ["OPENAI_MODEL"], client=client, harness=harness, runtime=runtime)
    return await vf.Agent(config).run(task)


if __name__ == "__main__":
    runtimes._runtime_cls = lambda config: HomeRuntime
    trace = asyncio.run(play(sys.argv[1], json.loads(sys.stdin.readline())["row"]["task"]))
    if trace.errors:
        sys.exit(f"verifiers: {trace.errors[-1]}")
    print(json.dumps({"reward": trace.reward, "metrics": {"turns": trace.num_turns}}))
