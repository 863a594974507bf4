"""Keys of servers that others run: a recipe names the environment variable that holds one."""

from __future__ import annotations

import os

from stages.core.errors import RecipeError


def key_in(variable: str | None, field: str) -> str:
    """The key that the environment variable holds; empty where a server asks for none.

    field: of the recipe, which names the variable. Raises RecipeError where that is not set.
    """
    if not variable:
        return ""
    key = os.environ.get(variable, "")
    if not key:
        raise RecipeError(
            f"the environment has no {variable}, which `{field}` names; set it, for instance in `execution.environment`"
        )
    return key
