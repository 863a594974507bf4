"""Limits on style problems in the project's texts; their numbers may only fall. Lower a bound with its count."""

import ast
import re
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOUNDS = {
    "flows": {"riddles": 0, "worn phrases": 0, "long files": 0, "import lines a thousand": 97},
    "stages": {"riddles": 0, "worn phrases": 0, "long files": 0, "import lines a thousand": 86},
    "tests": {"riddles": 0, "worn phrases": 17, "long files": 0, "import lines a thousand": 85},
}
SLACK = {"riddles": 30, "worn phrases": 30, "long files": 3, "import lines a thousand": 5}
"""Amount by which a count of style problems may fall below its bound before the bound must be lowered."""
MOST_LINES = 600
RIDDLE = re.compile(r"(Of|That|What|Whether|How|Where|Who|So)\b")
"""Pattern of first words that begin a docstring which cannot be understood without the code below it."""
WORN = re.compile(
    r"\b(told|anew|whoever|heed(s|ed|ing)?|mend(s|ed|ing)?|alike|nobody|in the place of|without a word|to be had|"
    r"for ever|what came of|word of)\b",
    re.IGNORECASE,
)
EXPLAINING = {"description", "help"}
"""Names of keyword arguments with texts for users: of pydantic fields, and of command options."""


VAGUE = {"one", "found", "told", "said", "stays", "means"}
"""Variable names that do not say what they hold."""
SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp
SCOPES |= ast.GeneratorExp
DEFINITIONS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def text_of(node):
    """Return the stripped text of a syntax node that is a string; "" for every other node."""
    value = node.value if isinstance(node, ast.Expr) else node
    return value.value.strip() if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def explanations(node):
    """Yield the syntax nodes of a definition's explanations: docstrings, and `description=` and `help=` strings."""
    if isinstance(node, DEFINITIONS):
        yield from node.body[:1]
        for before, after in pairwise(node.body):
            if isinstance(before, ast.Assign | ast.AnnAssign):
                yield after
    elif isinstance(node, ast.Call):
        yield from (keyword.value for keyword in node.keywords if keyword.arg in EXPLAINING)


@cache
def found_in(folder):
    """Count style problems in a folder's Python files; list unclear docstrings, worn phrases and long vague names."""
    counts, places, num_lines, num_imports = Counter(), {"riddles": [], "worn phrases": []}, 0, 0
    vague = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        if file == Path(__file__):
            continue
        source, name = file.read_text(), file.relative_to(ROOT)
        tree, lines = ast.parse(source), source.splitlines()
        counts["long files"] += len(lines) > MOST_LINES
        num_lines += len(lines)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                num_imports += node.end_lineno - node.lineno + 1
            for explaining in explanations(node):
                if RIDDLE.match(text := text_of(explaining)):
                    places["riddles"].append(f"{name}:{explaining.lineno}: {text.splitlines()[0]}")
        vague += [
            f"{name}:{first}: {variable}, until line {last}"
            for variable, first, last in (() if folder == "tests" else lives_of_vague_names(tree))
            if last - first >= 5
        ]
        if WORN.search(source):
            for line, text in enumerate(lines, 1):
                places["worn phrases"] += [f"{name}:{line}: {text.strip()}"] * len(WORN.findall(text))
    counts |= {what: len(where) for what, where in places.items()}
    counts["import lines a thousand"] = round(1000 * num_imports / num_lines)
    return counts, {**places, "vague": vague}


@pytest.mark.parametrize("folder", BOUNDS)
@pytest.mark.parametrize("what", SLACK)
def test_the_text_reads_no_worse_than_it_did(folder, what):
    counts, places = found_in(folder)
    count, bound = counts[what], BOUNDS[folder][what]
    shown = "\n".join(places.get(what, ()))
    assert count <= bound, f"{count} {what} in {folder}, at most {bound} are allowed; take the new ones out:\n{shown}"
    assert count >= bound - SLACK[what], f"only {count} {what} are left in {folder}: lower its bound, {bound}, to that"


def lives_of_vague_names(scope):
    """Yield each variable with a vague name, with the first and the last line of its use in a scope."""
    lines, todo = {}, list(ast.iter_child_nodes(scope))
    while todo:
        node = todo.pop()
        if isinstance(node, SCOPES):
            yield from lives_of_vague_names(node)
            continue
        name = getattr(node, "id", getattr(node, "arg", None))
        if name in VAGUE and not isinstance(node, ast.keyword):
            lines.setdefault(name, []).append(node.lineno)
        todo += ast.iter_child_nodes(node)
    yield from ((name, min(where), max(where)) for name, where in lines.items())


def test_a_name_that_lives_over_five_lines_says_what_it_is():
    assert [life for folder in ("flows", "stages") for life in found_in(folder)[1]["vague"]] == []


if __name__ == "__main__":
    for name in BOUNDS:
        counts, places = found_in(name)
        print(*(f"{what}\t{where}" for what, found in places.items() for where in found), sep="\n")
        print(f'    "{name}": {{{", ".join(f"{what!r}: {counts[what]}" for what in SLACK)}}},'.replace("'", '"'))
