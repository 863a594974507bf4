"""API keys of servers that others run: a recipe names the environment variable that holds one."""

from __future__ import annotations

import os

from stages.core.errors import RecipeError


def key_in(variable: str | None, field: str) -> str:
    """Return the key in the environment variable; empty where the server needs none.

    field: field of the recipe that names the variable. Raises RecipeError where the variable is not set.
    """
    if not variable:
        return ""
    key = os.environ.get(variable, "")
    if not key:
        raise RecipeError(
            f"the environment has no {variable}, which `{field}` names; set it, for instance in `execution.environment`"
        )
    return key
