"""Training engines (FSDP, Megatron) are named only in their own folders; other code looks them up in registries.

A third engine is then a module in each folder, and a line in each registry and list of names.
"""

import ast
from pathlib import Path

from flows.cli.recipe_commands import layouts
from stages.engines.registry import BUILDERS
from stages.parallel.engines.registry import RULES
from stages.parallel.layout import ENGINES
from stages.planner.engines.registry import COSTS

ROOT = Path(__file__).parents[2]
FOLDERS = ("stages/engines/", "stages/parallel/engines/", "stages/planner/engines/")
LISTED = {
    "stages/parallel/layout.py": 2,  # the Literal of all names, which type checkers cannot compute
    "stages/kinds/train/fields.py": 1,  # the default of `engine:`, which a reader of the fields looks for there
    "flows/cli/recipe_commands.py": 2,  # choices of an option, which help shows before pydantic is imported
}
"""Number of times that a training engine is named outside the engines' folders, by file."""


def names_in(file):
    """Return the line numbers of all strings in a file that are the name of a training engine."""
    text = file.read_text()
    nodes = ast.walk(ast.parse(text)) if any(name in text for name in ENGINES) else ()
    return [node.lineno for node in nodes if isinstance(node, ast.Constant) and node.value in ENGINES]


def test_no_other_code_names_an_engine():
    files = [file for folder in ("flows", "stages") for file in (ROOT / folder).rglob("*.py")]
    named = {str(file.relative_to(ROOT)): names_in(file) for file in files}
    named = {name: lines for name, lines in named.items() if lines and not name.startswith(FOLDERS)}
    assert {name: len(lines) for name, lines in named.items()} == LISTED, named


def test_every_engine_is_in_every_list():
    (option,) = (parameter for parameter in layouts.params if parameter.name == "engine")
    assert tuple(RULES) == tuple(COSTS) == tuple(BUILDERS) == tuple(option.type.choices) == ENGINES
