"""Prometheus text about a lifecycle home: its refreshes, stages, scores, gates, device seconds and disk.

A serving proxy has metrics of its own, `lifecycle_requests_total` and more (`stages/serving/tally.py`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flows.ledger.home import home
from flows.ledger.totals import Cursor, RecipeTotals, StageTotals, Totals, price_per_device_second, read_totals

if TYPE_CHECKING:
    from prometheus_client import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
RECIPE, STAGE = ("recipe",), ("recipe", "stage", "kind")


@dataclass(frozen=True)
class Family:
    """Metrics of one name. A sample of value None is left out. is_total: it only grows, and its name gets `_total`."""

    name: str
    meaning: str
    labels: tuple[str, ...]
    samples: Iterable[tuple[tuple[str, ...], float | None]]
    is_total: bool = False


def metrics_text() -> str:
    """Return all metrics of this lifecycle home as Prometheus text, up to date with its ledgers."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector

    totals, now_s = read_totals(), time.time()

    class Collected(Collector):
        """Collector of the totals that were just read."""

        def collect(self) -> Iterator[Metric]:
            for family in (*_home_families(totals), *_recipe_families(totals, now_s), *_stage_families(totals)):
                kind = CounterMetricFamily if family.is_total else GaugeMetricFamily
                metric = kind(f"lifecycle_{family.name}", family.meaning, labels=family.labels)
                for labels, value in family.samples:
                    if value is not None:
                        metric.add_metric(labels, value)
                yield metric

    registry = CollectorRegistry()
    registry.register(Collected())
    return generate_latest(registry).decode()


def _home_families(totals: Totals) -> Iterator[Family]:
    folder = home()
    disk = shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists()))
    damaged = sum(cursor.damaged_bytes is not None for cursor in totals.cursors.values())
    yield Family("home_free_bytes", "Free disk space of the lifecycle home.", (), [((), disk.free)])
    yield Family("home_size_bytes", "Size of the lifecycle home's disk.", (), [((), disk.total)])
    yield Family("damaged_ledgers", "Ledgers that could not be read to their end.", (), [((), damaged)])
    meaning = "1 while the hardware file cannot be read, so that nothing is added to prices."
    yield Family("damaged_hardware_file", meaning, (), [((), float(price_per_device_second() is None))])


def _recipe_families(totals: Totals, now_s: float) -> Iterator[Family]:
    def of_recipes(name: str, meaning: str, value: Callable[[RecipeTotals], float | None]) -> Family:
        return Family(name, meaning, RECIPE, [((key,), value(recipe)) for key, recipe in totals.recipes.items()])

    running: dict[str, list[Cursor]] = {name: [] for name in totals.recipes}
    for cursor in totals.cursors.values():
        if cursor.is_running and cursor.recipe in running:
            running[cursor.recipe].append(cursor)

    def of_running(name: str, meaning: str, value: Callable[[list[Cursor]], float]) -> Family:
        return Family(name, meaning, RECIPE, [((key,), value(cursors)) for key, cursors in running.items()])

    def seconds_since(times_ms: Iterable[int]) -> float:
        return max((now_s - time_ms / 1000 for time_ms in times_ms), default=0.0)

    yield of_recipes(
        "last_success_timestamp_seconds",
        "End of the latest whole refresh that ran through, promoted or not.",
        lambda recipe: recipe.last_success_ms / 1000 or None,
    )
    yield of_recipes(
        "last_success_age_seconds",
        "Time since the latest whole refresh that ran through.",
        lambda recipe: seconds_since([recipe.last_success_ms]) if recipe.last_success_ms else None,
    )
    yield of_recipes(
        "last_promotion_timestamp_seconds",
        "Time of the latest promotion of a candidate.",
        lambda recipe: recipe.last_promotion_ms / 1000 or None,
    )
    yield of_running("running_refreshes", "Refreshes that run.", len)
    yield of_running(
        "oldest_running_refresh_seconds",
        "Time since the oldest running refresh began.",
        lambda cursors: seconds_since(cursor.began_ms for cursor in cursors),
    )
    yield of_running(
        "waiting_stages",
        "Stages that wait for devices, for another refresh or in a cluster's queue.",
        lambda cursors: sum(len(cursor.waits) for cursor in cursors),
    )
    yield of_running(
        "longest_wait_seconds",
        "Time for which the stage that waits longest has waited.",
        lambda cursors: seconds_since(since_ms for cursor in cursors for since_ms in cursor.waits.values()),
    )
    yield Family(
        "last_refresh_state",
        "State in which the latest refresh ended, as a label.",
        ("recipe", "state"),
        [((name, recipe.last_state), 1.0) for name, recipe in totals.recipes.items() if recipe.last_state],
    )
    yield Family(
        "refreshes",
        "Refreshes, and comparisons of layouts, that ended.",
        ("recipe", "kind", "state"),
        [
            ((name, kind, state), float(count))
            for name, recipe in totals.recipes.items()
            for kind, counts in (("refresh", recipe.refreshes), ("comparison", recipe.comparisons))
            for state, count in counts.items()
        ],
        is_total=True,
    )


def _stage_families(totals: Totals) -> Iterator[Family]:
    stages = [
        ((recipe, name, stage.kind), stage)
        for recipe, found in totals.recipes.items()
        for name, stage in found.stages.items()
    ]

    def of_stages(name: str, meaning: str, value: Callable[[StageTotals], float | None], total: bool = True) -> Family:
        return Family(name, meaning, STAGE, [(labels, value(stage)) for labels, stage in stages], total)

    def of_values(name: str, meaning: str, label: str, values: Callable[[StageTotals], Mapping[str, float]]) -> Family:
        samples = [((*labels, key), value) for labels, stage in stages for key, value in values(stage).items()]
        return Family(name, meaning, (*STAGE, label), samples, label == "outcome")

    yield of_values("attempts", "Attempts at a stage, and times it was cached.", "outcome", lambda one: one.attempts)
    yield of_stages("stage_seconds", "Run time of all attempts at a stage.", lambda stage: stage.seconds)
    yield of_stages(
        "stage_wait_seconds", "Time for which a stage waited before it began.", lambda stage: stage.waited_s
    )
    yield of_stages("device_seconds", "Device time of all attempts at a stage.", lambda stage: stage.device_seconds)
    yield of_stages(
        "device_price",
        "Price of the device time, in the currency of the hardware file.",
        lambda stage: stage.cost or None,
    )
    yield of_stages(
        "stage_last_seconds", "Run time of the latest build.", lambda stage: stage.last_seconds, total=False
    )
    yield of_stages(
        "stage_tokens_per_second",
        "Tokens per second of the latest training.",
        lambda stage: stage.tokens_per_s,
        total=False,
    )
    yield of_values("score", "Latest score of an evaluation.", "score", lambda stage: stage.scores)
    yield of_values(
        "gate_margin",
        "By how much the latest candidate kept a gate; negative if it missed it.",
        "gate",
        lambda stage: stage.margins,
    )
