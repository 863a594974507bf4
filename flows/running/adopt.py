"""Adopt a model or dataset from outside: it becomes the artifact of a download stage whose source is `file://PATH`.

So it passes the checks of a download, and a recipe that names the same content finds it cached.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from flows.planning.outside import resolve_outside
from flows.planning.plan import plan
from flows.planning.stored import ADOPTED_RECIPE
from flows.recipe.recipe import load_stages
from flows.running.runner import Built, Observer, run_stage
from flows.store.store import Store
from stages.core.errors import StoreError


def adopt(store: Store, path: Path, product: Literal["model", "dataset"], name: str, observer: Observer) -> Built:
    """Copy a file or folder into the store and commit it as stage `name`.

    Raises what a download raises: `DownloadError` for links that lead out of the folder, `ModelError` for pickled
    weights or an incomplete model, `DataError` for a dataset without data files. `RecipeError` for a bad name.
    """
    path = path.absolute()
    if path.resolve().is_relative_to(store.root.resolve()):
        raise StoreError(f"cannot adopt {path}: it lies in the store already")
    recipe = load_stages(ADOPTED_RECIPE, path.parent, {name: {"kind": "download", product: f"file://{path}"}})
    planned = plan(recipe, resolve_outside(recipe), store.index())
    return run_stage(planned.stages[name], {}, store, observer)
