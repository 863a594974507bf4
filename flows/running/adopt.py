"""Adoption of a model, adapter or dataset on this machine into the artifact store, as a download stage would fetch it.

So they pass the checks of a download, and a recipe that names the same content finds it cached.
"""

import os
from pathlib import Path
from typing import Literal

from flows.planning.outside import resolve_outside
from flows.planning.plan import PlannedStage, plan
from flows.planning.stored import ADOPTED_RECIPE
from flows.recipe.recipe import load_stages
from flows.recipe.version import identity_of, resume_key_of, version_of
from flows.running.runner import BuiltStage, Observer, run_stage
from flows.store.record import Artifact
from flows.store.store import Store
from stages.core.errors import RecipeError, StoreError


def adopt(
    store: Store,
    path: Path,
    product: Literal["model", "adapter", "dataset"],
    name: str,
    observer: Observer,
    base: Artifact | None = None,
) -> BuiltStage:
    """Copy a local model, adapter or dataset into the artifact store as the artifact of a download stage `name`.

    base: model of an adapter. Raises what a download raises: `DownloadError` for links that lead out of the folder,
    `ModelError` for pickled weights, an incomplete model or an adapter of another base, `DataError` for a dataset
    without data files. `RecipeError` for a bad name.
    """
    path = path.absolute()
    real_path = Path(
        os.path.realpath(path)
    )  # unlike `resolve`, it accepts a link to itself, which the download then reports
    if real_path.is_relative_to(store.root.resolve()):
        raise StoreError(f"cannot adopt {path}: it lies in the store already")
    tree = {name: {"kind": "download", product: f"file://{path}"}}
    if base is None:
        recipe = load_stages(ADOPTED_RECIPE, path.parent, tree)
        return run_stage(plan(recipe, resolve_outside(recipe), store.index()).stages[name], {}, store, observer)
    if base.record.product != "model" or base.record.stage == name:
        raise RecipeError(
            f"adopting {name}: its base {base.folder.name} is a {base.record.product}; expected a model of another name"
        )
    planned = _planned_on(base, name, path)
    record = base.record
    upstream = BuiltStage(record.stage, record.kind, record.version, "cached", 0.0, base.folder, record)
    return run_stage(planned, {record.stage: upstream}, store, observer)


def _planned_on(base: Artifact, name: str, path: Path) -> PlannedStage:
    """Return the planned download stage that stores a local adapter, with the artifact `base` as its base model."""
    stage = base.record.stage
    tree = {
        stage: {"kind": "download", "model": f"file://{base.folder}/model"},
        name: {"kind": "download", "adapter": f"file://{path}", "base": stage},
    }
    recipe = load_stages(ADOPTED_RECIPE, path.parent, tree)
    config, versions = recipe.stages[name], {stage: base.record.version}
    outside = resolve_outside(recipe, [name])[name]
    identity = identity_of(config, versions, outside)
    return PlannedStage(
        recipe=recipe.name,
        name=name,
        kind=config.kind,
        version=version_of(identity),
        resume_key=resume_key_of(config, versions, outside),
        identity=identity,
        config=config,
        upstream=(stage,),
        ancestors=(stage,),
        action="run",
        reason="adopted",
    )
