"""Requests for a refresh, made by a person, a schedule or a retry, and the planning of what they ask for."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flows.ledger.home import store_root
from flows.ledger.record import RefreshRecord
from flows.planning.changes import CONTENTS_CACHE, with_changes
from flows.planning.checks import (
    Problems,
    check_among,
    check_arguments,
    check_buckets,
    check_idle,
    check_limits,
    check_publishing,
    installation_notes,
)
from flows.planning.devices import check_devices, device_notes
from flows.planning.input_check import check_first_inputs, check_models
from flows.planning.layout_choice import check_shared_devices, choose_layouts
from flows.planning.model_shape import ModelConfigs
from flows.planning.outside import as_built_before, resolve_outside
from flows.planning.plan import Plan, chosen_stages, plan
from flows.planning.stored import find_stored
from flows.recipe.recipe import Recipe, load_recipe
from flows.recipe.text import without_secrets
from flows.servers.programs import MLFLOW_SWITCH, uses_mlflow
from flows.store.shared import with_shared
from flows.store.store import Store
from stages.core.errors import LifecycleError, RecipeError, ResourceError
from stages.core.redaction import redact, secrets_in
from stages.hubs.answers import PLANNING_LIMIT_S

if TYPE_CHECKING:  # a comparison starts stages and writes reports; a plan does not
    from flows.running.comparison import LayoutComparison


@dataclass(frozen=True)
class RefreshRequest:
    """Request for a refresh: recipe, overrides, options. Its JSON form serves as parameters of a Prefect deployment."""

    recipe: str
    overrides: tuple[str, ...] = ()
    until: str | None = None
    force: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedRefresh:
    """Refresh that has been planned, ready to run."""

    request: RefreshRequest
    plan: Plan
    store: Store
    notes: tuple[str, ...] = ()
    """Notes for the person on decisions made while planning, such as the layout chosen for `layout: auto`."""
    comparison: LayoutComparison | None = None
    """Comparison of layouts to run once all stages of the plan are built; None for an ordinary refresh."""
    recipe_text: str = ""
    """Text of the recipe to record in the ledger, without secrets."""


def retry_of(record: RefreshRecord) -> RefreshRequest:
    """Return the request that retries a refresh, with the same options; what is built is not forced again."""
    built = [name for name, entry in record.stages.items() if entry.state in ("built", "cached")]
    force = tuple(name for name in record.force if name not in built)
    return RefreshRequest(str(record.recipe_path), record.overrides, record.until, force)


def make_plan(request: RefreshRequest, *, may_be_unreachable: bool = False) -> PlannedRefresh:
    """Plan a refresh: load its recipe, check it, and decide which stages would run.

    may_be_unreachable: plan as far as possible when a hub does not answer, instead of raising TransientError. Raises
    what `load_recipe`, `resolve_outside` and `plan` raise, and `ResourceError` when there are too few GPUs.
    """
    errors: list[RecipeError] = []
    recipe = load_recipe(Path(request.recipe), request.overrides, errors)
    if errors and (
        not recipe.stages or not {*request.force, request.until or next(iter(recipe.stages))} <= recipe.stages.keys()
    ):
        raise errors[0]
    check_registry(recipe, chosen_stages(recipe, request.until))
    try:
        return _plan_of(recipe, request, errors, may_be_unreachable=may_be_unreachable)
    except LifecycleError as error:  # it may quote a template or a task that holds a secret of the recipe
        variables = {name: text for one in recipe.stages.values() for name, text in one.execution.environment.items()}
        error.args = (redact(str(error), secrets_in({**os.environ, **variables})),)
        raise


def check_registry(recipe: Recipe, chosen: Collection[str]) -> None:
    """Raise RecipeError for promotions where MLflow, whose registry has the champions, is switched off."""
    promotions = [name for name in recipe.stages if name in chosen and "verdict" in recipe.stages[name].PRODUCTS]
    if promotions and not uses_mlflow():
        raise RecipeError(
            f"stages.{promotions[0]}: promotions need MLflow, whose registry has the champions, and {MLFLOW_SWITCH} "
            "switches it off; unset that variable, or leave the stage out with --until"
        )


def _plan_of(
    recipe: Recipe, request: RefreshRequest, errors: Sequence[RecipeError], *, may_be_unreachable: bool
) -> PlannedRefresh:
    """Plan a recipe; raise one error with all that the checks find. errors: of stages that are no part of it."""
    store = Store(store_root())
    unreachable: dict[str, str] | None = {} if may_be_unreachable else None
    chosen = chosen_stages(recipe, request.until)
    index = store.index()
    problems = Problems(errors)
    failed: dict[str, LifecycleError] = {}
    recipe, notes = find_stored(recipe, chosen, index, failed)
    with problems.noted():
        notes += check_idle(recipe, chosen)
    outside = resolve_outside(recipe, chosen, unreachable, failed)
    # What a stage needs is not installed here: no problem as long as its artifact is cached.
    without_programs = {name: error for name, error in failed.items() if isinstance(error, ResourceError)}
    for name, error in failed.items():
        built = as_built_before(recipe, name, index) if name in without_programs else None
        if built is None:
            problems.add(error)
        outside[name] = built or {}
    # Checks of files, models and data leave these stages out, whose problem is reported already.
    with problems.noted():
        check_among(recipe, [name for name in chosen if name not in failed])
    sound = {name: resolved for name, resolved in outside.items() if name not in failed}
    configs = ModelConfigs(recipe, sound, index, PLANNING_LIMIT_S if may_be_unreachable else None)
    with problems.noted():
        check_limits(recipe, chosen, configs)
    unasked: list[str] = []
    with problems.noted():
        unasked = check_arguments(recipe, chosen, at_once=may_be_unreachable)
    # Before `plan`, since versions contain the chosen layouts.
    with problems.noted():
        recipe, choices = choose_layouts(recipe, chosen, configs, unreachable, failed)
        notes += map(str, choices)
    unusual: list[str] = []
    with problems.noted():
        unusual = check_models(recipe, sound, index)
    planned = plan(
        recipe,
        outside,
        with_shared(store, index),
        force=request.force,
        until=request.until,
        unreachable=unreachable or {},
    )
    for name, missing in without_programs.items():
        if planned.stages[name].action == "run":
            problems.add(missing)
        else:
            notes.append(f"{name}: cached, and could not be built again here: {missing}")
    will_run = [name for name, stage in planned.stages.items() if stage.action == "run"]
    with problems.noted():
        check_first_inputs(recipe, will_run, sound, index)
    with problems.noted():
        check_devices(planned)
        check_shared_devices(recipe, will_run, configs)
    with problems.noted():
        check_publishing(planned)
        check_buckets(planned)
    notes += device_notes(recipe, chosen)
    with problems.noted():
        notes += installation_notes(planned)
    problems.check()
    planned = with_changes(planned, index, store.cache_folder(CONTENTS_CACHE))
    return PlannedRefresh(
        request, planned, store, (*notes, *unusual, *unasked), recipe_text=without_secrets(recipe.text)
    )
