"""Environment of built-in tools: the model calls them and reads their answers, until it answers without a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from stages.data import calculator
from stages.data.messages import Tool, parse_tools
from stages.rollouts.environments.environment import (
    Action,
    Call,
    EnvironmentConfig,
    MakeEnvironment,
    Step,
    tool_message,
)

Run = Callable[[str], str]
"""Function of a tool's only argument, a text, that returns its answer; ValueError with a reason for the model."""
TOOLS: dict[str, tuple[Run, dict[str, Any]]] = {"calculator": (calculator.calculate, calculator.DEFINITION)}
"""Built-in tools by name, with the definition that the model gets; each takes one text."""


class ToolsEnvironment(EnvironmentConfig):
    """Environment of built-in tools: `{tools: [calculator]}`. An episode ends with a turn that calls none."""

    tools: tuple[Literal["calculator"], ...] = Field(min_length=1, description="Tools that the model may call.")

    @property
    def definitions(self) -> tuple[Tool, ...]:
        return parse_tools({"tools": [TOOLS[name][1] for name in self.tools]})

    @contextlib.contextmanager
    def opened(self) -> Iterator[MakeEnvironment]:
        runs: dict[str, Run] = {name: TOOLS[name][0] for name in self.tools}
        yield lambda: ToolsEpisode(runs, self.definitions)


class ToolsEpisode:
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
