"""Sources that name artifacts of this store (`store://…`, a champion), resolved to the artifacts' present folders.

`store://sft`, `store://sft-0123456789ab`, `adopted:NAME` and `models:/NAME@champion` may stand wherever `file://PATH`
may; their content is identity, like that of other files.
"""

import json
import subprocess
import sys
from collections.abc import Collection, MutableMapping
from dataclasses import replace

from flows.recipe.recipe import Recipe
from flows.recipe.text import closest
from flows.store.content import CONTENT_FOLDERS
from flows.store.record import Artifact, Index
from stages.core.errors import INTERNAL_ERROR, LifecycleError, RecipeError, ServerError, error_classes
from stages.core.fields import Product
from stages.hubs.hub import Source
from stages.hubs.registry import HUBS

ADOPTED_RECIPE = "adopted"
CHAMPION_PROGRAM = "flows.champion.key"
"""Program that asks MLflow for the champion, named as text: it is in a room above, and its import takes seconds."""


def find_stored(
    recipe: Recipe, chosen: Collection[str], index: Index, failed: MutableMapping[str, LifecycleError] | None = None
) -> tuple[Recipe, list[str]]:
    """Return the recipe with sources that name artifacts replaced by their folders, and a note on each.

    failed: where given, takes the error of each stage that has one; others are replaced. Raises `RecipeError` for what
    is not in the store, and what asking for the champion raises, with stage and field.
    """
    stages, notes = dict(recipe.stages), []
    for name in chosen:
        config = recipe.fetched.get(name)
        if config is None or not HUBS[config.source.hub].artifacts:
            continue
        try:
            artifact = _find(config.source, config.product, index)
        except LifecycleError as error:
            named = type(error)(f"stages.{name}.{config.product}: {error}")
            if failed is None:
                raise named from error
            failed[name] = named
            continue
        folder = artifact.folder / CONTENT_FOLDERS[config.product]
        stages[name] = config.model_copy(update={config.product: f"file://{folder}"})
        notes.append(
            f"{name}: {config.source} is {artifact.folder.name}, built {artifact.record.finished:%Y-%m-%d %H:%M}"
        )
    return replace(recipe, stages=stages), notes


def _find(source: Source, product: Product, index: Index) -> Artifact:
    artifacts = [one for one in index.of_product(product) if not one.damage]
    named = HUBS[source.hub].artifacts
    if named == "champions":
        key = _champion(str(source))
        champion = index.find(*key.split("/"))
        if champion and product == "model" and (base := index.base_of(champion.record)):
            raise RecipeError(
                f"{source} is an adapter, {champion.folder.name}, of {base.stage}-{base.version}, not a model; promote "
                "what a stage of `kind: merge` makes of it, or name it as `adapter`, with its `base`"
            )
        matches = [one for one in artifacts if f"{one.record.kind}/{one.record.version}" == key]
    else:
        of_recipe = [one for one in artifacts if named == "all" or one.record.recipe == ADOPTED_RECIPE]
        # A stage's name, such as `sft`, or one artifact's, `sft-0123456789ab`.
        matches = [one for one in of_recipe if source.name in (one.record.stage, one.folder.name)]
        artifacts = of_recipe
    if not matches:
        known = {one.record.stage for one in artifacts}
        raise RecipeError(f"looking for {source}: the store has no such {product}{closest(source.name, known)}")
    # Of all versions of a stage the one built last.
    return max(matches, key=lambda artifact: artifact.record.finished)


def _champion(uri: str) -> str:
    """Ask MLflow for the model of an alias such as `champion`; return `KIND/VERSION` or raise the program's error."""
    done = subprocess.run([sys.executable, "-m", CHAMPION_PROGRAM, uri], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return str(json.loads(done.stdout)["model"])
    # The program says by its exit code which error it had, so that `run` answers with the same one.
    kinds = {error.exit_code: error for error in error_classes().values() if error.exit_code != INTERNAL_ERROR}
    reason = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    raise kinds.get(done.returncode, ServerError)(f"asking for {uri}: {reason[-1]}")
