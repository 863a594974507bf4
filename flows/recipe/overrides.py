"""Overrides of a recipe as `path=value` texts, such as those of `lifecycle run --set`, with values read as YAML."""

from collections.abc import Iterator, Sequence
from typing import Any

from flows.recipe.text import closest, parse_yaml, show
from stages.core.errors import RecipeError
from stages.core.redaction import holds_url_password, shortened
from stages.core.yaml_bounds import MAX_DEPTH

ENVIRONMENT = ("execution", "environment")
"""Path of a stage's environment variables within its config."""


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Apply `path=value` overrides to a recipe's tree, in order; return the problems, which repeat no secrets."""
    return [problem for override in overrides for problem in _apply_override(tree, override)]


def _apply_override(tree: dict[str, Any], override: str) -> Iterator[str]:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys) or len(keys) > MAX_DEPTH:
        yield f"override {_shown(path)}: expected PATH=VALUE, such as stages.sft.learning_rate=1e-4"
        return
    if keys[0] == "stages" and len(keys) > 1 and keys[1] not in tree["stages"]:
        yield f"override {_shown(path)}: there is no stage {_shown(keys[1])}{closest(keys[1], tree['stages'])}"
        return
    try:
        value = parse_yaml(text)
    except RecipeError as error:
        yield f"override {_shown(path)}: {error}"
        return
    problem = _refusal(keys, value) or _put(tree, keys, value)
    if problem:
        yield f"override {_shown(path)}: {problem}"


def _refusal(keys: Sequence[str], value: Any) -> str | None:
    if keys == ["stages"] and not (isinstance(value, dict) and value):
        return f"found {show(value)}, expected a non-empty mapping from names to stages"
    if any(_is_secret(names, leaf) for names, leaf in _leaves(value, tuple(keys))):
        return (
            "a command line can be seen by everyone on the machine; put the value into the recipe, "
            "or into the environment that `lifecycle` is started in"
        )
    return None


def _is_secret(names: Sequence[str], leaf: Any) -> bool:
    if isinstance(leaf, str) and holds_url_password(leaf):
        return True
    # Any variable of a stage counts: its name need not show that it is secret, and ledgers record overrides.
    # stages.NAME.execution.environment.VARIABLE
    return leaf is not None and tuple(names[2:4]) == ENVIRONMENT and len(names) > 4


def _leaves(tree: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each single value (no mapping or list) in a recipe's tree, with the keys that lead to the value."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, (*names, key))
    elif isinstance(tree, list):
        for value in tree:
            yield from _leaves(value, names)
    else:
        yield names, tree


def _put(tree: dict[str, Any], keys: Sequence[str], value: Any) -> str | None:
    """Set a value at a path of the recipe; return a message if a value on the way is not a mapping."""
    parent = tree
    for depth, key in enumerate(keys[:-1], 1):
        # Absent, or `execution:` with nothing behind it, which YAML reads as null.
        if parent.get(key) is None:
            parent[key] = {}
        parent = parent[key]
        if not isinstance(parent, dict):
            obstacle = f"`{'.'.join(keys[:depth])}` is {show(parent)}"
            return f"{obstacle}, which has no field {_shown(keys[depth])}; override it as a whole"
    parent[keys[-1]] = value
    return None


def _shown(text: str) -> str:
    return f"`{shortened(text, 100)}`"
