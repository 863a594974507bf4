"""Registry of environments. To add one, write a module beside this file and add one line here."""

from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Discriminator, Tag

from stages.rollouts.environments.environment import EnvironmentConfig
from stages.rollouts.environments.openenv import OpenEnvEnvironment
from stages.rollouts.environments.program import ProgramEnvironment
from stages.rollouts.environments.python import PythonEnvironment
from stages.rollouts.environments.reasoning_gym import ReasoningGymEnvironment
from stages.rollouts.environments.tools import ToolsEnvironment

ENVIRONMENTS: dict[str, type[EnvironmentConfig]] = {
    "tools": ToolsEnvironment,
    "python": PythonEnvironment,
    "program": ProgramEnvironment,
    "reasoning_gym": ReasoningGymEnvironment,
    "openenv": OpenEnvEnvironment,
}
"""Environments by the field that names each in a recipe."""


def _named(value: Any) -> str | None:
    """Return the field by which a recipe's environment is known; None where there is none, or several."""
    if isinstance(value, EnvironmentConfig):
        return next(name for name, kind in ENVIRONMENTS.items() if type(value) is kind)
    named = [name for name in ENVIRONMENTS if isinstance(value, dict) and name in value]
    return named[0] if len(named) == 1 else None


if TYPE_CHECKING:  # the union depends on the registry, which no type checker runs
    AnyEnvironment = EnvironmentConfig
else:
    AnyEnvironment = Annotated[
        Union[tuple(Annotated[kind, Tag(name)] for name, kind in ENVIRONMENTS.items())],  # noqa: UP007
        Discriminator(
            _named,
            custom_error_type="environment",
            custom_error_message=f"expected one environment, by one of the fields {', '.join(ENVIRONMENTS)}",
        ),
    ]
