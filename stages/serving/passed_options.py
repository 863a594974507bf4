"""Options of an engine's server that a recipe passes through where most of its options would do more than tune it: load
weights that are no safetensors, run code of others, name files that no version knows, or open doors past the proxy.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from stages.core.errors import RecipeError


@dataclass(frozen=True)
class PassedOptions:
    """title: the engine's, in messages. names: of the options that are passed; no other is."""

    title: str
    names: tuple[str, ...]

    def refusals(self, arguments: Mapping[str, JsonValue]) -> Iterator[str]:
        """`OPTION: why`, of those that are passed to no server."""
        for name, value in arguments.items():
            if name not in self.names:
                close = difflib.get_close_matches(name, self.names, n=2)
                meant = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(self.names)}"
                yield f"{name}: no option that is passed on to {self.title}; {meant}"
            elif value is None or value is False:
                yield f"{name}: found {json.dumps(value)}; leave the option out, or say true for one without a value"

    def written(self, arguments: Mapping[str, JsonValue]) -> dict[str, list[str]]:
        """Option → how the command line has it. Raises RecipeError for one that is refused."""
        if refused := list(self.refusals(arguments)):
            raise RecipeError(f"the arguments of {self.title}: {'; '.join(refused)}")
        return {
            name: [f"--{name}"]
            if value is True
            else [f"--{name}={value if isinstance(value, str) else json.dumps(value)}"]
            for name, value in arguments.items()
        }
