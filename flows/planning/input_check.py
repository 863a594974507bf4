"""Checks of models, rows and adapters that already lie on this machine, before a plan runs or copies anything."""

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

from flows.planning.devices import GPU, sees_gpus
from flows.planning.model_shape import download_of, read_known_facts
from flows.planning.outside import Outside
from flows.recipe.recipe import Recipe
from flows.recipe.version import identity_of, version_of
from flows.store.content import CONTENT_FOLDERS
from flows.store.record import Index
from stages.core.contract import ModelAtHand
from stages.core.errors import RecipeError
from stages.hubs.fetched import FetchedConfig
from stages.hubs.registry import HUBS
from stages.models.facts import CONFIG_FILE, ModelFacts


def check_models(recipe: Recipe, outside: Outside, index: Index) -> list[str]:
    """Check whether stages suit their models, where a model's config is on this machine; return notes on oddities.

    Raises RecipeError that lists every model that cannot be trained, layout that its model does not allow, and bad
    template.
    """
    problems: list[str] = []
    notes: list[str] = []
    for name, config in recipe.stages.items():
        if name in outside:
            gpu_type = GPU.torch_type if sees_gpus(config) else None
            for field, finding in config.model_findings(partial(_model, recipe, name, outside, index), gpu_type):
                if isinstance(finding, str):
                    notes.append(f"{name}: {finding}")
                else:
                    problems.append(f"stages.{name}.{field}: {finding}")
    if problems:
        raise RecipeError("\n".join(problems))
    return notes


def _model(recipe: Recipe, name: str, outside: Outside, index: Index) -> ModelAtHand | None:
    """Return the model that a stage starts from, or None if its config is not on this machine."""
    download = download_of(recipe, name)
    if download not in outside:
        return None
    source = recipe.fetched[download]
    facts = _local_facts(source, outside[download], index)
    # With patterns only some of the folder's files are fetched, so the folder is not what the stage will get.
    is_here = HUBS[source.source.hub].is_local and source.request.patterns is None
    folder = Path(source.source.name) if is_here else None
    return ModelAtHand(str(source.source), facts.config, folder) if facts else None


def _local_facts(source: FetchedConfig, outside: dict[str, Any], index: Index) -> ModelFacts | None:
    """Return the facts (config, tokens) of a stage's downloaded model, or None if its config is not on this machine."""
    artifact = index.find(source.kind, version_of(identity_of(source, {}, outside)))
    if artifact and not artifact.damage and (artifact.folder / "model" / CONFIG_FILE).is_file():
        return ModelFacts(artifact.folder / "model")
    return read_known_facts(source, outside) if HUBS[source.source.hub].is_offline else None


def check_first_inputs(recipe: Recipe, will_run: Collection[str], outside: Outside, index: Index) -> None:
    """Raise RecipeError that lists every problem in local rows and adapters that stages about to run will read."""
    problems = [
        f"stages.{name}.{problem}"
        for name, config in recipe.stages.items()
        if name in will_run
        for problem in config.first_problems(
            partial(_model_folder, recipe, outside, index, name), partial(_folder, recipe, outside, index)
        )
    ]
    if problems:
        raise RecipeError("\n".join(problems))


def _model_folder(recipe: Recipe, outside: Outside, index: Index, name: str) -> Path | None:
    """Return the local folder of the model that a stage starts from, or None if it is not on this machine."""
    return _folder(recipe, outside, index, download_of(recipe, name))


def _folder(recipe: Recipe, outside: Outside, index: Index, name: str) -> Path | None:
    """Return the local folder with a download stage's files, in the artifact store or at their source, else None.

    A dataset may be one file. A selection of a folder's files is left to the check of inputs.
    """
    config = recipe.fetched.get(name)
    if config is None or name not in outside or config.leaves_files:
        return None
    artifact = index.find(config.kind, version_of(identity_of(config, {}, outside[name])))
    if artifact and not artifact.damage:
        return artifact.folder / CONTENT_FOLDERS[config.product]
    # Headers are read even while files are being hashed; rows of such large files are left to the check of inputs.
    is_known = config.product == "model" or "revision" in outside[name]
    is_here = HUBS[config.source.hub].is_local and config.request.patterns is None and is_known
    return Path(config.source.name) if is_here else None
