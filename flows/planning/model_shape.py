"""Shape (layers, widths, …) of the model that a train stage starts from, known even before it is downloaded.

Training and quantization do not change a model's shape, so it is that of the download at the root: read from the store,
else from the source itself, or a table of published models while the source does not answer.
"""

import sys
from functools import partial

from pydantic import JsonValue

from flows.planning.outside import Outside
from flows.recipe.recipe import Recipe
from flows.recipe.version import identity_of, version_of
from flows.store.record import Index
from stages.core.contract import base_of
from stages.core.errors import RecipeError, TransientError
from stages.core.lines import say
from stages.hubs.answers import PLANNING_OFFLINE_LIMIT_S, BackgroundLookups
from stages.hubs.fetched import FetchedConfig
from stages.hubs.registry import HUBS, read_model_config
from stages.models.facts import CONFIG_FILE, ModelFacts
from stages.models.known_configs import known_config
from stages.models.known_models import known_model
from stages.models.shape import ModelShape
from stages.models.walked import shape_of


def download_of(recipe: Recipe, stage: str) -> str:
    """Return the name of the download stage from which a stage's `model` descends; for an adapter, its base model's."""
    name = base_of(stage, recipe.stages)
    while name not in recipe.fetched:
        upstream = recipe.stages[name].references().get("model")
        if upstream is None:
            raise RecipeError(f"looking for the model of {stage}: {name} refers to none")
        # An adapter has no shape; its base model has.
        name = base_of(upstream, recipe.stages)
    return name


class ModelConfigs:
    """Facts (config, sizes) of the models that a recipe's stages download; each is asked of its hub only once.

    A download that is not in `outside` has none. limit_s: time for all hubs together.
    """

    def __init__(self, recipe: Recipe, outside: Outside, index: Index, limit_s: float | None = None) -> None:
        self._recipe, self._outside, self._index = recipe, outside, index
        self._limit_s = limit_s
        offline_limit_s = None if limit_s is None else PLANNING_OFFLINE_LIMIT_S
        self._answers = {
            True: BackgroundLookups[ModelFacts | None](offline_limit_s),
            False: BackgroundLookups[ModelFacts | None](limit_s),
        }
        """Pending requests for models' facts: under True those to local files, under False those to a hub."""

    def of(self, name: str) -> ModelFacts | None:
        """Return the facts of a download's model; None until its hub responds. Raises DownloadError or ModelError."""
        if name not in self._outside:
            return None
        config = self._recipe.fetched[name]
        answers = self._answers[HUBS[config.source.hub].is_offline]
        if name not in answers:
            answers.ask(name, partial(self._read, config, self._outside[name]))
        try:
            return answers.of(name)
        except TransientError:
            if self._limit_s is None:
                raise
            return None

    def shape_of(self, name: str) -> ModelShape:
        """Return the shape of the model that a stage downloads. Raises also ModelError for an unknown model family."""
        facts = self.of(name)
        if facts is not None:
            return measured_shape(facts)
        source = str(self._recipe.fetched[name].source)
        known = published_shape(source)
        if known is None:
            raise TransientError(
                f"cannot read the {CONFIG_FILE} of {source} yet: its hub has not answered, and no table of published "
                "models has it; `lifecycle run` waits longer"
            )
        return known

    def _read(self, config: FetchedConfig, outside: dict[str, JsonValue]) -> ModelFacts | None:
        artifact = self._index.find(config.kind, version_of(identity_of(config, {}, outside)))
        if artifact and not artifact.damage:
            return ModelFacts(artifact.folder / "model")
        return read_known_facts(config, outside)


def published_shape(name: str) -> ModelShape | None:
    """Return the shape of the published model that a name mentions, without a hub, or None."""
    if facts := known_config(name):
        return measured_shape(facts)
    return known_model(name)


def measured_shape(facts: ModelFacts) -> ModelShape:
    """Return a model's shape, of any family; say on stderr what is waited for, where that takes seconds."""
    return shape_of(facts, partial(say, stream=sys.stderr))


def read_known_facts(config: FetchedConfig, outside: dict[str, JsonValue]) -> ModelFacts | None:
    """Read a model's facts from its source; None if its hub has not responded yet with the revision to read.

    Local files need no revision: the config is read while the weights beside it are still being hashed.
    """
    if "revision" not in outside and not HUBS[config.source.hub].is_local:
        return None
    return ModelFacts(read_model_config(config.source, str(outside.get("revision"))))
