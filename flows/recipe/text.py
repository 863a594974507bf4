"""Recipe text: YAML and `path=value` overrides → a plain tree of dicts, lists and values.

YAML as PyYAML's safe loader reads it, with three differences: a key that appears twice in one mapping is an error,
`1e-4` is a number (YAML 1.1 wants `1.0e-4`), and dates stay text.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from stages.core.errors import RecipeError
from stages.core.redaction import is_secret_name

BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

MAX_RECIPE_BYTES = 1 << 20
MAX_VALUES = 100_000


class RecipeLoader(BaseLoader):
    """A safe loader that refuses what nobody means."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                raise RecipeError(f"line {line}: the key `{key.value}` is already in line {seen[key.value]}")
            seen[str(key.value)] = line
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in BaseLoader.yaml_implicit_resolvers.items()
}
RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str) -> Any:
    """One YAML document as dicts, lists and values of JSON. Raises `RecipeError` that says in which line."""
    try:
        tree = yaml.load(text, RecipeLoader)  # noqa: S506 (derives from the safe loader)
        _check_size(tree)
        # Through JSON and back: aliases become copies of their own, so that an override changes one place only.
        return json.loads(json.dumps(tree))
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise RecipeError(f"{where}not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"not a tree of YAML values: {error}") from error


def _check_size(tree: Any) -> None:
    """Aliases of aliases may stand for billions of values in a few lines. Raises `RecipeError`."""
    num_values = _num_values(tree, {})
    if num_values > MAX_VALUES:
        raise RecipeError(
            f"its aliases (`*name`) stand for {num_values:,} values, more than {MAX_VALUES:,}; write out what is meant"
        )


def _num_values(tree: Any, known: dict[int, int]) -> int:
    """How many values a tree has when its aliases are written out. Raises RecursionError when one holds itself."""
    if not isinstance(tree, dict | list):
        return 1
    if id(tree) not in known:
        children = tree.values() if isinstance(tree, dict) else tree
        known[id(tree)] = 1 + sum(_num_values(child, known) for child in children)
    return known[id(tree)]


def read_tree(path: Path) -> dict[str, Any]:
    """The recipe file's tree. Raises `RecipeError` when it cannot be read or is not a mapping with `stages`."""
    try:
        if path.stat().st_size > MAX_RECIPE_BYTES:
            raise RecipeError(f"it is larger than {MAX_RECIPE_BYTES:,} bytes, which no recipe is")
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}") from error
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error
    if not isinstance(tree, dict) or not isinstance(tree.get("stages"), dict) or not tree["stages"]:
        raise RecipeError(f"{path}: expected a mapping with `name` and a non-empty mapping `stages`")
    return tree


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Put `path=value` overrides into the tree, in order. Returns the problems found."""
    return [problem for override in overrides for problem in _apply_override(tree, override)]


def _apply_override(tree: dict[str, Any], override: str) -> Iterator[str]:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        yield f"override `{override}`: expected PATH=VALUE, such as stages.sft.learning_rate=1e-4"
        return
    if keys[0] == "stages" and len(keys) > 1 and keys[1] not in tree["stages"]:
        yield f"override `{override}`: there is no stage `{keys[1]}`{closest(keys[1], tree['stages'])}"
        return
    if "environment" in keys and is_secret_name(keys[-1]):
        yield (
            f"override `{path}`: a command line can be seen by everyone on the machine; put the value into the recipe, "
            "or into the environment that `lifecycle` is started in"
        )
        return
    parent = tree
    for depth, key in enumerate(keys[:-1], 1):
        if parent.get(key) is None:
            parent[key] = {}
        parent = parent[key]
        if not isinstance(parent, dict):
            found = f"`{'.'.join(keys[:depth])}` is {show(parent)}"
            yield f"override `{override}`: {found}, which has no field `{keys[depth]}`; override it as a whole"
            return
    try:
        parent[keys[-1]] = parse_yaml(text)
    except RecipeError as error:
        yield f"override `{override}`: {error}"


def resolve_file_sources(tree: Any, folder: Path) -> Any:
    """The tree with every `file://PATH` made absolute, relative to the recipe's folder."""
    if isinstance(tree, dict):
        return {key: resolve_file_sources(value, folder) for key, value in tree.items()}
    if isinstance(tree, list):
        return [resolve_file_sources(value, folder) for value in tree]
    if isinstance(tree, str) and tree.startswith("file://"):
        return f"file://{absolute(Path(tree.removeprefix('file://')), folder)}"
    return tree


def absolute(path: Path, folder: Path) -> Path:
    """The path without `~` and `..`, relative paths starting at `folder`."""
    return Path(os.path.normpath(folder / path.expanduser()))


def non_finite(tree: Any, path: str) -> Iterator[str]:
    """Dotted paths of infinities and NaNs, which no field may be."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from non_finite(value, f"{path}.{key}")
    elif isinstance(tree, list):
        for position, value in enumerate(tree):
            yield from non_finite(value, f"{path}.{position}")
    elif isinstance(tree, float) and not math.isfinite(tree):
        yield path


def closest(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?` with the closest known word, or what there is to choose from, if anything."""
    words = list(known)
    if not words:
        return ""
    found = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return f"; did you mean `{found[0]}`?" if found else f"; there are: {', '.join(words)}"


def show(value: Any) -> str:
    """A value as YAML would have it, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"
