"""Artifact versions of every recipe under configs/ stay what they are: nobody's store is invalidated by a refactoring.

A version changes when a stage would give another artifact than before, and only then: `STAGE_VERSION` is raised, or a
recipe says something else. After such a change: `python tests/unit/configs/test_versions.py > …/versions.json`.
"""

import json
from pathlib import Path

from flows.planning.plan import plan
from flows.recipe.recipe import load_recipe
from flows.store.record import Index

RECORDED = Path(__file__).with_name("versions.json")
RECIPES = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
OUTSIDE = {"revision": "recorded"}
"""Stands in for what a hub, a file or an installed program would say, which is not ours to keep."""


def versions_of(path):
    recipe = load_recipe(path)
    planned = plan(recipe, dict.fromkeys(recipe.stages, OUTSIDE), Index(()))
    return {name: stage.version for name, stage in planned.stages.items()}


def test_versions_of_all_recipes_are_the_recorded_ones():
    recorded = json.loads(RECORDED.read_text())
    assert {path.stem: versions_of(path) for path in RECIPES} == recorded


if __name__ == "__main__":
    print(json.dumps({path.stem: versions_of(path) for path in RECIPES}, indent=1))
