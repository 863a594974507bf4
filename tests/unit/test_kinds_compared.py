"""Code rarely tests a stage's kind, as in `kind == "train"`; it asks the stage's config class instead."""

import ast
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from stages.core.contract import StageConfig
from stages.data.config import ROW_KINDS
from stages.harnesses.registry import HARNESSES
from stages.hubs.registry import HUBS
from stages.kinds.publish.card import RELATIONS
from stages.kinds.publish.targets.registry import TARGETS
from stages.kinds.quantize.registry import METHODS as QUANTIZERS
from stages.kinds.registry import KINDS, kind_of, makes
from stages.kinds.train.methods.registry import METHODS
from stages.models.processed.registry import PROCESSED
from stages.serving.config import EngineName

ROOT = Path(__file__).parents[2]
MOST_COMPARISONS = 10
COMPARISONS = {
    "cli/render.py": (1, "manifests are of servers"),
    "compare/plan.py": (1, "layouts are compared of trainings"),
    "launch/local.py": (1, "promotions run in a program that speaks to MLflow, which stages do not"),
    "planning/changes.py": (1, "only a source has files that change"),
    "planning/layout_advice.py": (1, "layouts are of trainings"),
    "planning/layout_choice.py": (1, "layouts are of trainings"),
    "planning/starter.py": (1, "a starter's recipe trains"),
    "recipe/recipe.py": (1, "every chain of references ends at a source"),
    "running/data_look.py": (1, "a look fetches small sources, and runs nothing else"),
    "tracking/labels.py": (1, "a source is logged, although its path is no identity"),
}
"""Number of places in each file of `flows/` that may compare a stage's kind (`kind == "train"`), with the reason."""
COMPARISONS_OF_STAGES = {
    "kinds/curate/run.py": (1, "`train` is the name of a split there"),
    "kinds/publish/card.py": (1, "a record holds the name of a kind, and a kind imports no other"),
    "kinds/registry.py": (1, "the registry"),
}
"""Number of places in each file of `stages/` that may compare a stage's kind (`kind == "train"`), with the reason."""
IMPORTS = 25
"""Number of imports in `flows/` from modules of single stage kinds; it may only fall."""


REGISTERED = {*METHODS, *HUBS, *HARNESSES, *get_args(EngineName), *QUANTIZERS, *TARGETS, *ROW_KINDS, *PROCESSED}


def subclasses(base):
    """Return a class with all of its subclasses, direct and indirect."""
    return {base}.union(*map(subclasses, base.__subclasses__()))


CONFIGS = {one.__name__ for one in subclasses(StageConfig) if one.__module__.startswith("stages.")} - {"StageConfig"}


def names_kinds(node):
    """Return whether a tuple, list or set in Python code contains only names of stage kinds."""
    items = node.keys if isinstance(node, ast.Dict) else node.elts
    return bool(items) and all(isinstance(item, ast.Constant) and item.value in KINDS for item in items)


def is_kind(node):
    """Return whether a Python expression reads a stage's kind, such as `record.kind` or `identity["kind"]`."""
    match node:
        case ast.Attribute(attr="kind") | ast.Name(id="kind") | ast.Subscript(slice=ast.Constant(value="kind")):
            return True
    return False


def is_comparison(node):
    """Return whether a node tests a stage's kind: `kind == "train"`, `isinstance(config, TrainConfig)`, …"""
    match node:
        case ast.Compare():
            inside = [*ast.walk(node)]
            return any(map(is_kind, inside)) and any(
                isinstance(one, ast.Constant) and one.value in KINDS for one in inside
            )
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, classes]):
            return any(isinstance(one, ast.Name) and one.id in CONFIGS for one in ast.walk(classes))
        case ast.Tuple() | ast.List() | ast.Set() | ast.Dict():
            return names_kinds(node)
    return False


def trees(folder, *words):
    """Yield the name and the syntax tree of each module of a folder that has one of these words: most have none."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        text = file.read_text()
        if any(word in text for word in words):
            yield file.relative_to(ROOT / folder).as_posix(), ast.parse(text)


def quoted(names):
    """Return names as texts in code, which the style check holds to double quotes."""
    return [f'"{name}"' for name in names]


@pytest.mark.parametrize(("folder", "allowed"), [("flows", COMPARISONS), ("stages", COMPARISONS_OF_STAGES)])
def test_kinds_are_compared_in_few_places(folder, allowed):
    words = (*quoted(KINDS), *CONFIGS)
    found = Counter(name for name, tree in trees(folder, *words) for node in ast.walk(tree) if is_comparison(node))
    assert found == {name: number for name, (number, _) in allowed.items()}
    assert found.total() <= MOST_COMPARISONS


def test_a_card_knows_how_each_kind_changes_a_model():
    assert {kind: config.RELATION for kind, config in KINDS.items() if config.RELATION} == RELATIONS


def test_flows_import_few_modules_of_kinds():
    modules = [
        node.module
        for _, tree in trees("flows", "stages.kinds.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stages.kinds.")
    ]
    assert len([name for name in modules if name != "stages.kinds.registry"]) == IMPORTS


def test_flows_compare_names_of_registries_in_one_place():
    """Code in `flows/` compares names of registries (methods, hubs, …) in one place: these say what they need."""
    compared = [
        (name, item.value)
        for name, tree in trees("flows", *quoted(REGISTERED))
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for item in ast.walk(node)
        if isinstance(item, ast.Constant) and item.value in REGISTERED
    ]
    # MLflow's own name for datasets of that hub
    assert compared == [("tracking/datasets.py", "hf")]


def test_a_stage_makes_a_product_of_its_kind():
    assert all(config.PRODUCTS for config in KINDS.values())
    assert makes("evaluate", "scores") and not makes("train", "scores")


def test_a_kind_of_another_version_has_the_defaults():
    unknown = kind_of("forecast")
    assert not unknown.PRODUCTS and not unknown.LEARNS and not unknown.REPORTED.curves
