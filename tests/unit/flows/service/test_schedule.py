"""Schedules that are invalid, or that never start a run, are refused before any request to Prefect's server."""

import re

import pytest

from flows.service.schedule import schedule_spec
from stages.core.errors import RecipeError


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "nightly.yaml"
    path.write_text("stages:\n  rows: {kind: download, dataset: builtin/addition}\n")
    return path


def test_a_schedule_has_the_name_of_its_recipe(recipe, monkeypatch):
    monkeypatch.chdir(recipe.parent)
    spec = schedule_spec(recipe.relative_to(recipe.parent), "0 3 * * *", "Europe/Berlin")
    assert (spec.name, spec.recipe) == ("nightly", recipe)
    assert (spec.when.cron, spec.when.timezone) == ("0 3 * * *", "Europe/Berlin")


@pytest.mark.parametrize(
    "cron", ["99 3 * * *", "every night", "0 3 * *", "H 3 * * *", "", "0 3 * * * *", "0 3 * * * * *", "R 3 * * *"]
)
def test_a_bad_cron_expression_is_said_with_what_is_expected(recipe, cron):
    with pytest.raises(RecipeError, match=r"scheduling nightly: `.*` is no cron expression; expected minute, hour"):
        schedule_spec(recipe, cron, "UTC")


@pytest.mark.parametrize("cron", ["0 3 31 2 *", "0 3 30 2 *", "0 3 31 4,6,9,11 *"])
def test_a_day_that_never_comes_is_said(recipe, cron):
    with pytest.raises(
        RecipeError, match=f"scheduling nightly: `{re.escape(cron)}` is never due: no year has such a day"
    ):
        schedule_spec(recipe, cron, "UTC")


@pytest.mark.parametrize(
    "cron", ["1-0 * * * *", "0 22-4 * * *", "0 3 * 12-1 *", "0 3 * * fri-mon", "0 0,5-4/2 * * *", "0 3 * dec-JAN *"]
)
def test_a_range_that_runs_backwards_is_refused(recipe, cron):
    with pytest.raises(RecipeError, match=r"which runs backwards; expected the lower end first; write `22-23"):
        schedule_spec(recipe, cron, "UTC")


@pytest.mark.parametrize(
    "cron",
    [
        "0 3 * * sat-sun",
        "0 3 * * mon-sun",
        "0-0 3 * * *",
        "0 3 * * 5-7",
        "0 3 29 2 *",
        "@daily",
        "*/15 8-18 * * MON-FRI",
        "0 3 31 * *",
    ],
)
def test_days_that_come_in_some_years_or_months_are_taken(recipe, cron):
    assert schedule_spec(recipe, cron, "UTC").when.cron == cron


@pytest.mark.parametrize(("timezone", "close"), [("Europe/Berlni", "did you mean `Europe/Berlin`"), ("../etc", "")])
def test_an_unknown_time_zone_is_said_with_the_closest_one(recipe, timezone, close):
    with pytest.raises(RecipeError, match=f"there is no time zone `{timezone}`; .*{close}"):
        schedule_spec(recipe, "0 3 * * *", timezone)


def test_a_recipe_is_checked_with_its_overrides(recipe):
    with pytest.raises(RecipeError, match="there is no stage `row`; did you mean `rows`"):
        schedule_spec(recipe, "0 3 * * *", "UTC", ("stages.row.kind=train",))
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*nowhere\.yaml"):
        schedule_spec(recipe.with_name("nowhere.yaml"), "0 3 * * *", "UTC")


def test_a_schedule_may_not_override_what_only_a_recipe_says(recipe):
    with pytest.raises(RecipeError, match=r"rows\.execution\.launcher: only the recipe says where a stage runs"):
        schedule_spec(recipe, "0 3 * * *", "UTC", ("stages.rows.execution.launcher=slurm",))
