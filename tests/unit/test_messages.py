"""Error messages contain no sliced texts, since half a secret would not be recognized and redacted."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXEMPT = {"stages/core/redaction.py", "flows/recipe/text.py"}
"""Files that may slice texts: the module that redacts secrets, and one that replaces a whole value."""
FILES = sorted(
    path
    for room in ("flows", "stages")
    for path in (ROOT / room).rglob("*.py")
    if str(path.relative_to(ROOT)) not in EXEMPT
)
DIGESTS = {"sha256", "hexdigest", "revision", "commit", "version", "digest"}
"""Names of variables that error messages may slice: digests and other long values that are no secrets."""
CUTTERS = {"shorten"}
"""Names of functions that shorten texts, such as `textwrap.shorten`, which error messages may not use."""
SPELLERS = {"repr", "str"}


def cut_texts(tree: ast.AST) -> Iterator[int]:
    """Yield the line numbers where an f-string slices a value that is no digest, or where a text is shortened."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue) and _is_cut(node.value):
            yield node.lineno
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CUTTERS:
            yield node.lineno


def _is_cut(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        if isinstance(value.func, ast.Attribute):
            return _is_cut(value.func.value)  # `text[:60].strip()`
        return value.func.id in SPELLERS and any(map(_is_cut, value.args))
    if not isinstance(value, ast.Subscript) or not isinstance(value.slice, ast.Slice) or value.slice.upper is None:
        return False
    return not DIGESTS & {getattr(node, "attr", getattr(node, "id", None)) for node in ast.walk(value.value)}


def test_messages_are_cut_by_shortened_or_quoted():
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in cut_texts(ast.parse(path.read_text("utf-8")))
    ]
    assert found == [], "cut with stages.core.redaction.quoted or shortened, which redact first"


@pytest.mark.parametrize(
    "line", ['f"has {text[:60]!r}"', 'f"has {json.dumps(x)[:60]}"', 'f"{repr(text[:5])}"', "textwrap.shorten(a, 5)"]
)
def test_a_cut_text_is_seen(line):
    assert list(cut_texts(ast.parse(line))) == [1]


@pytest.mark.parametrize("line", ['f"has {digest.hexdigest()[:12]}"', "f\"{', '.join(names[:3])}\"", "text[:60]"])
def test_what_is_no_cut_text_passes(line):
    assert list(cut_texts(ast.parse(line))) == []
