"""Text of recipes: YAML parsed into a plain tree of dicts, lists and values, and helpers for messages about it.

YAML as PyYAML's safe loader reads it, with three differences: a key that appears twice in one mapping is an error,
`1e-4` is a number (YAML 1.1 wants `1.0e-4`), and dates stay text.
"""

import difflib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from stages.core.errors import RecipeError
from stages.core.redaction import REPLACEMENT, redact, shortened
from stages.core.yaml_bounds import MAX_BYTES, check_bounds

# The C loader is several times as fast; a PyYAML built without libyaml lacks it.
BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

MAX_DIGITS = 100
MAX_INTEGER = 2**63 - 1
MAX_WORDS, MAX_WORD_CHARACTERS = 256, 100
"""Most known words with which a misspelt word is compared for a hint, and length of the longest word compared."""


class RecipeLoader(BaseLoader):
    """Safe YAML loader that refuses duplicate keys and overlong numbers."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            # PyYAML would silently take the last of equal keys.
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise RecipeError(f"line {line}: the key `{key.value}` is already in line {seen[key.value]}")
            seen[str(key.value)] = line
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Convert a YAML number, refusing long ones (`1:00:00:…` is one), which are slow or impossible to convert."""
        if len(node.value) > MAX_DIGITS:
            problem = f"found a number of {len(node.value):,} characters, expected at most {MAX_DIGITS}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        try:
            is_int = node.tag.endswith(":int")
            number: int | float = self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)
        except (ValueError, ArithmeticError) as error:
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error
        return number


for _type in ("int", "float"):
    RecipeLoader.add_constructor(f"tag:yaml.org,2002:{_type}", RecipeLoader.construct_number)
RecipeLoader.yaml_implicit_resolvers = {
    # PyYAML would make datetime objects of dates, which JSON does not have.
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in BaseLoader.yaml_implicit_resolvers.items()
}
RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str) -> Any:
    """Parse one YAML document into dicts, lists and JSON values. Raises RecipeError that names the line."""
    # Before anything is built: a few lines of merges (`<<`) would fill the memory.
    check_bounds(text, RecipeLoader)
    try:
        tree = yaml.load(text, RecipeLoader)  # noqa: S506 (derives from the safe loader)
        # Through JSON and back: aliases become copies of their own, so that an override changes one place only.
        return json.loads(json.dumps(tree))
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise RecipeError(f"{where}not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise RecipeError(f"not a tree of YAML values: {error}") from error


def read_text(path: Path, what: str = "the recipe") -> str:
    """Return a file's text; raise RecipeError if it cannot be read. what: the file in the message."""
    try:
        return _read_regular_file(path)
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot read {what} {shortened(str(path), 200)}: {error}") from error
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error


def read_tree(path: Path) -> dict[str, Any]:
    """Read a recipe file into a tree of dicts, lists and values. Raises what `read_text` and `tree_of` raise."""
    return tree_of(read_text(path), path)


def tree_of(text: str, path: Path) -> dict[str, Any]:
    """Parse a recipe's text into a tree. Raises RecipeError if it is not a mapping with `stages`."""
    try:
        tree = parse_yaml(text)
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from error
    if not isinstance(tree, dict) or not isinstance(tree.get("stages"), dict) or not tree["stages"]:
        raise RecipeError(f"{path}: expected a mapping with `name` and a non-empty mapping `stages`")
    return tree


def without_secrets(text: str) -> str:
    """Return a recipe's text with `***` in place of passwords and of each value of an `execution`'s `environment`."""
    hidden: set[tuple[int, int]] = set()
    for execution in _under("execution", yaml.compose(text, RecipeLoader)):
        for variables in _under("environment", execution):  # also within what a merge (`<<`) adds
            hidden |= {(one.start_mark.index, one.end_mark.index) for one in _values(variables)}
    # From the end, so that positions of the values before stay valid.
    for start, end in sorted(hidden, reverse=True):
        behind = text[start:end].rstrip()  # a block scalar includes its last line break, which is kept
        text = f"{text[:start]}{REPLACEMENT!r}{text[start + len(behind) :]}"
    return redact(text)


def _under(name: str, root: yaml.Node | None) -> Iterator[yaml.Node]:
    """Yield the value of every key of this name in a YAML document; an alias counts as its anchor's node."""
    todo = [root] if root else []
    seen: set[int] = set()
    while todo:
        node = todo.pop()
        # An alias may also stand inside its own anchor: without this, such a document never ends.
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            yield from (value for key, value in node.value if key.value == name)
            todo += [one for pair in node.value for one in pair]
        elif isinstance(node, yaml.SequenceNode):
            todo += node.value


def _values(node: yaml.Node) -> Iterator[yaml.ScalarNode]:
    """Yield all scalar nodes inside a YAML node."""
    if isinstance(node, yaml.ScalarNode):
        yield node
    for child in node.value if isinstance(node, yaml.CollectionNode) else ():
        yield from _values(child[1] if isinstance(node, yaml.MappingNode) else child)


def _read_regular_file(path: Path) -> str:
    status = path.stat()
    # Reading a pipe or a device might never end.
    if not stat.S_ISREG(status.st_mode):
        raise RecipeError("it is no regular file; expected a file of text")
    if status.st_size > MAX_BYTES:
        raise RecipeError(f"it is larger than {MAX_BYTES:,} bytes")
    return path.read_text(encoding="utf-8")


def resolve_file_sources(tree: Any, folder: Path) -> Any:
    """Return a recipe's tree with each `file://PATH` made absolute, relative to the recipe's folder."""
    if isinstance(tree, dict):
        return {key: resolve_file_sources(value, folder) for key, value in tree.items()}
    if isinstance(tree, list):
        return [resolve_file_sources(value, folder) for value in tree]
    # An empty path, which is refused later.
    if isinstance(tree, str) and tree.startswith("file://") and tree != "file://":
        return f"file://{absolute(Path(tree.removeprefix('file://')), folder)}"
    return tree


def absolute(path: Path, folder: Path) -> Path:
    """Return a path made absolute from `folder`, with `~` and `..` resolved."""
    # `..` is taken away from the text; symbolic links are not followed.
    return Path(os.path.normpath(folder / os.path.expanduser(path)))  # noqa: PTH111 (Path's raises for an unknown user)


def bad_numbers(tree: Any, path: str) -> Iterator[str]:
    """Yield a problem for each infinity, NaN or integer beyond 64 bits in a recipe's tree, which no field accepts."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from bad_numbers(value, f"{path}.{key}")
    elif isinstance(tree, list):
        for position, value in enumerate(tree):
            yield from bad_numbers(value, f"{path}.{position}")
    elif isinstance(tree, float) and not math.isfinite(tree):
        yield f"{path}: found {show(tree)}, expected a finite number"
    elif isinstance(tree, int) and abs(tree) > MAX_INTEGER:
        yield f"{path}: found {shortened(str(tree), 40)}, expected at most {MAX_INTEGER}, which 64 bits hold"


def closest(word: str, known: Iterable[str]) -> str:
    """Return a hint `; did you mean …?` with the known word closest to a misspelt one, or a list of the known words.

    Initials count as close: `lr` means `learning_rate`. Comparing takes time quadratic in the words' length.
    """
    words = [one for one in islice(known, MAX_WORDS) if len(one) <= MAX_WORD_CHARACTERS]
    if not words:
        return ""
    # learning_rate -> lr
    matches = [one for one in words if word == "".join(part[:1] for part in one.split("_")) and "_" in one]
    if not matches and len(word) <= MAX_WORD_CHARACTERS:
        matches = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return f"; did you mean `{matches[0]}`?" if matches else f"; there are: {', '.join(words)}"


def show(value: Any) -> str:
    """Return a value as JSON text, shortened for a message."""
    return shortened(json.dumps(value, ensure_ascii=False), 58)
