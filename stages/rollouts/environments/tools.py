"""Environment of built-in tools: the model calls them and reads their answers, until it answers without a call."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from stages.core.contract import OutsidePath
from stages.core.fields import AddedLater, Seconds, StrictModel
from stages.data import calculator
from stages.data.messages import Tool, parse_tools
from stages.rewards.sandbox import Sandbox
from stages.rollouts.environments import search
from stages.rollouts.environments.environment import (
    Action,
    Call,
    Environment,
    EnvironmentConfig,
    MakeEnvironment,
    Step,
    tool_message,
)

Run = Callable[[str], str]
"""Function of a tool's only argument, a text, that returns its answer; ValueError with a reason for the model."""
PYTHON = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code; returns what it prints.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}


class SearchTool(StrictModel):
    """Search of a folder's texts: `search: FOLDER`."""

    search: OutsidePath = Field(
        description="Folder with texts in UTF-8, whose paragraphs are searched; a change of its content builds the "
        "stage again."
    )


ToolName = Annotated[
    Annotated[Literal["calculator", "python"], Tag("name")] | Annotated[SearchTool, Tag("search")],
    Discriminator(lambda value: "name" if isinstance(value, str) else "search"),
]


class ToolsEnvironment(EnvironmentConfig):
    """Environment of built-in tools: `{tools: [calculator]}`. An episode ends with a turn that calls none."""

    tools: tuple[ToolName, ...] = Field(
        min_length=1, description="Tools that the model may call: calculator, python, and search: FOLDER."
    )
    code_timeout_s: Annotated[Seconds, AddedLater()] = Field(
        10.0, description="Time limit of a run of the model's code (tool python), in seconds."
    )
    code_memory_gib: Annotated[float, AddedLater()] = Field(
        1.0, ge=0.125, le=1024, description="Limit on the address space of a run of the model's code, in GiB."
    )

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [tool["function"]["name"] for tool in self.definitions]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"`tools` has {twice} twice, and a call says the name alone; remove one")
        return self

    @property
    def num_threads(self) -> int:
        return len(os.sched_getaffinity(0)) if "python" in self.tools else 1

    @property
    def definitions(self) -> tuple[Tool, ...]:
        known = {"calculator": calculator.DEFINITION, "python": PYTHON}
        return parse_tools(
            {"tools": [known[tool] if isinstance(tool, str) else search.DEFINITION for tool in self.tools]}
        )

    @contextlib.contextmanager
    def opened(self, folder: Path) -> Iterator[MakeEnvironment]:
        runs: dict[str, Run] = {}
        for tool in self.tools:
            if isinstance(tool, SearchTool):
                runs["search"] = search.Passages(tool.search).search
            elif tool == "python":
                self._sandbox.prove("the tool python")
                runs["python"] = self._run_code
            else:
                runs["calculator"] = calculator.calculate
        yield lambda: ToolsEpisode(runs, self.definitions)

    def custom_code(self) -> str | None:
        return "code in the model's calls, within limits" if "python" in self.tools else None

    @property
    def _sandbox(self) -> Sandbox:
        return Sandbox(self.code_timeout_s, self.code_memory_gib)

    def _run_code(self, code: str) -> str:
        problem, output = self._sandbox.output(code, self.max_answer_bytes)
        if problem:
            raise ValueError("\n".join(filter(None, [problem, output])))
        return output


class ToolsEpisode(Environment):
    """Episode with tools, which keep nothing between calls."""

    def __init__(self, runs: Mapping[str, Run], tools: tuple[Tool, ...]) -> None:
        """Create the episode. runs: tools by name. tools: their definitions."""
        self._runs = runs
        self._arguments = {
            tool["function"]["name"]: next(iter(tool["function"]["parameters"]["properties"])) for tool in tools
        }

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        return None

    def step(self, action: Action) -> Step:
        if action.malformed:
            return Step((tool_message(f"error: {action.malformed}"),), num_failed=1)
        if not action.calls:
            return Step((), done=True)
        answers = [self._answer(call) for call in action.calls]
        return Step(
            tuple(tool_message(text) for text, _ in answers), num_failed=sum(is_error for _, is_error in answers)
        )

    def close(self) -> None:
        return

    def _answer(self, call: Call) -> tuple[str, bool]:
        """Return the text that answers a call, and whether it is an error."""
        run, name = self._runs.get(call.name), self._arguments.get(call.name)
        if run is None or name is None:
            return f"error: there is no tool {call.name!r}; there are: {', '.join(self._runs)}", True
        if not isinstance(call.arguments, dict) or call.arguments.keys() != {name}:
            return f"error: {call.name} takes one argument, {name!r}", True
        value = call.arguments[name]
        if not isinstance(value, str):
            return f"error: {name!r} must be a text", True
        try:
            return run(value), False
        except ValueError as error:
            return f"error: {error}", True
