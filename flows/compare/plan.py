"""Plan of `lifecycle compare`: a refresh of the upstream stages, then the compared stage under each layout."""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from flows.compare.layouts import BATCH_FIELD, RefusedLayout, read_layouts, text_of, without_misfits
from flows.ledger.events import CompareBegan, LayoutEntry
from flows.ledger.home import store_root
from flows.planning.layout_choice import choose_layouts
from flows.planning.model_shape import ModelConfigs, download_of
from flows.planning.outside import resolve_outside
from flows.planning.plan import Plan, PlannedStage, chosen_stages, plan
from flows.planning.stored import find_stored
from flows.recipe.recipe import load_recipe
from flows.recipe.text import without_secrets
from flows.recipe.version import identity_of, resume_key_of, version_of
from flows.running.comparison import LayoutComparison
from flows.running.request import PlannedRefresh, RefreshRequest
from flows.store.store import Store
from flows.tracking.labels import params_of, tags_of
from stages.core.errors import ModelError, RecipeError, TransientError
from stages.kinds.train.config import TrainConfig


@dataclass(frozen=True)
class ComparisonRequest:
    """Command-line arguments of `lifecycle compare`, before the recipe is read."""

    recipe: str
    stage: str
    layouts: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    num_steps: int = 20
    num_warmup_steps: int = 5
    num_rounds: int = 2


def plan_comparison(request: ComparisonRequest) -> PlannedRefresh:
    """Plan a refresh of all stages upstream of the compared one, followed by a trial of each layout.

    Raises what `load_recipe`, `resolve_outside` and `plan` raise, and RecipeError that lists every bad layout.
    """
    recipe = load_recipe(Path(request.recipe), request.overrides)
    chosen = chosen_stages(recipe, request.stage)
    stage = recipe.stages[request.stage]
    if not isinstance(stage, TrainConfig):
        raise RecipeError(f"comparing layouts of {request.stage}: it is a {stage.kind} stage, expected a train stage")
    configs, refused = read_layouts(request.layouts, stage)
    store = Store(store_root())
    index = store.index()
    recipe, _ = find_stored(recipe, chosen, index)
    outside = resolve_outside(recipe, chosen)
    models = ModelConfigs(recipe, outside, index)
    with suppress(ModelError, TransientError):  # the model's sizes are unknown before the download
        configs, refused = without_misfits(configs, models.shape_of(download_of(recipe, request.stage)), refused)
    recipe, _ = choose_layouts(recipe, outside, models)
    upstream = plan(recipe, outside, index, until=request.stage).stages
    measured = upstream.pop(request.stage)
    layouts = tuple(_under_layout(measured, config, upstream) for config in configs)
    texts = [text_of(config, stage.global_batch_size) for config in configs]
    began = CompareBegan(
        stage=request.stage,
        num_steps=request.num_steps,
        num_warmup_steps=request.num_warmup_steps,
        num_rounds=request.num_rounds,
        layouts=(
            *(_entry(*layout) for layout in zip(texts, layouts, configs, strict=True)),
            *(_refused_entry(one, layouts[0]) for one in refused),
        ),
    )
    asked = RefreshRequest(request.recipe, request.overrides, until=request.stage)
    return PlannedRefresh(
        asked, Plan(recipe.name, upstream), store, (), LayoutComparison(began, layouts), without_secrets(recipe.text)
    )


def _under_layout(planned: PlannedStage, config: TrainConfig, upstream: dict[str, PlannedStage]) -> PlannedStage:
    """Return the compared stage planned with another parallel layout, as a refresh would plan it."""
    versions = {name: upstream[name].version for name in planned.upstream}
    outside = planned.identity["outside"]
    assert isinstance(outside, dict)
    identity = identity_of(config, versions, outside)
    return replace(
        planned,
        config=config,
        identity=identity,
        version=version_of(identity),
        resume_key=resume_key_of(config, versions, outside),
        action="run",
    )


def _entry(text: str, planned: PlannedStage, config: TrainConfig) -> LayoutEntry:
    return LayoutEntry(
        text=text,
        engine=config.engine,
        num_devices=config.layout.world_size,
        global_batch_size=config.global_batch_size,
        params=params_of(planned),
        tags=tags_of(planned),
    )


def _refused_entry(refused: RefusedLayout, like: PlannedStage) -> LayoutEntry:
    """Return the record of a layout that cannot work, with its parameters and the reason, for the refresh's ledger."""
    fields = {f"layout.{name}": str(value) for name, value in refused.layout.model_dump(mode="json").items()}
    changed = {"engine": refused.engine, BATCH_FIELD: str(refused.global_batch_size)}
    tags = {name: value for name, value in tags_of(like).items() if name != "version"}
    return LayoutEntry(
        text=refused.text,
        engine=refused.engine,
        num_devices=refused.layout.world_size,
        global_batch_size=refused.global_batch_size,
        params={**params_of(like), **changed, **fields},
        tags={**tags, "engine": refused.engine, "layout": refused.text},
        refused=refused.reason,
    )
