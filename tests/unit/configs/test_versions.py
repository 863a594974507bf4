"""Artifact versions of the recipes under configs/ stay the same, so that a refactoring invalidates no store.

When a `STAGE_VERSION` is raised, or a recipe changes: `python tests/unit/configs/test_versions.py > …/versions.json`.
"""

import json
from pathlib import Path

from flows.planning.plan import plan
from flows.recipe.recipe import load_recipe
from flows.store.record import Index

RECORDED = Path(__file__).with_name("versions.json")
RECIPES = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
OUTSIDE = {"revision": "recorded"}
"""Fixed stand-in for each hash of a file and each hub revision, so that only recipes and code affect the versions."""


def versions_of(path):
    recipe = load_recipe(path)
    planned = plan(recipe, dict.fromkeys(recipe.stages, OUTSIDE), Index(()))
    return {name: stage.version for name, stage in planned.stages.items()}


def test_versions_of_all_recipes_are_the_recorded_ones():
    recorded = json.loads(RECORDED.read_text())
    assert {path.stem: versions_of(path) for path in RECIPES} == recorded


if __name__ == "__main__":
    print(json.dumps({path.stem: versions_of(path) for path in RECIPES}, indent=1))
