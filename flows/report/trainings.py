"""Training curves for a refresh's report, with those of earlier champions behind them, and the trainings' data."""

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from flows.ledger.record import RefreshRecord, StageEntry, final_result
from flows.report.model import Curve, DataOfTraining, Histogram, Share, TrainingCurves
from flows.store.record import Artifact, Index
from flows.tracking.rows import CURVES, HELD_OUT, is_curve, rows_of
from stages.core.metric_series import MetricSeries
from stages.data.summaries import LENGTHS_FILE, Lengths
from stages.kinds.registry import kind_of

MOST_POINTS = 1000
"""Most points of a curve in an HTML report; a screen cannot show more."""
MOST_POINTS_OF_PAGE = 25_000
"""Most points of all curves of an HTML report, at some 30 bytes each: two refreshes compared stay below 2 MB."""
FEWEST_POINTS = 25
MOST_CHAMPIONS = 3
"""Most earlier champions whose curves are drawn behind the new ones."""
ASKED, SEEN = "share_asked.", "share_seen."


def training_curves(record: RefreshRecord, index: Index) -> list[TrainingCurves]:
    """Return the charts of every training stage that has logged a loss, failed stages included.

    A chart holds metrics that share a scale: the losses, the rewards, and each other metric of the method.
    """
    charts = list(_training_curves(record, index))
    num_curves = sum(len(chart.curves) for chart in charts) or 1
    most = max(FEWEST_POINTS, min(MOST_POINTS, MOST_POINTS_OF_PAGE // num_curves))
    return [
        chart.model_copy(update={"curves": tuple(_thinned(curve, most) for curve in chart.curves)}) for chart in charts
    ]


def _training_curves(record: RefreshRecord, index: Index) -> Iterator[TrainingCurves]:
    champions = list(islice(_earlier_champions(record, index), MOST_CHAMPIONS))
    for name, entry in record.stages.items():
        if not kind_of(entry.kind).REPORTED.curves or not (own := list(_own_curves(record, name, entry))):
            continue
        earlier = [curve for one in champions for curve in _curves_behind(one, name, entry, index)]
        charts: dict[str, list[Curve]] = {}
        for curve in (*own, *earlier):
            charts.setdefault(_chart_of(curve.metric), []).append(curve)
        for chart, curves in charts.items():
            if not all(curve.behind for curve in curves):
                yield TrainingCurves(stage=name, chart=chart, curves=tuple(curves))


def _chart_of(metric: str) -> str:
    name = metric.removeprefix(HELD_OUT)
    return next((group for group in ("loss", "reward") if name.startswith(group)), name).replace("_", " ")


def _own_curves(record: RefreshRecord, name: str, entry: StageEntry) -> Iterator[Curve]:
    """Yield a stage's training curves in this refresh, from its artifact or else from its last attempt's folder."""
    attempts = record.attempts_at(name)
    folder = entry.artifact or entry.work or (attempts[-1].folder if attempts else None)
    if folder:
        yield from _curves(folder, "", behind=False)


def _curves_behind(champion: Artifact, stage: str, entry: StageEntry, index: Index) -> Iterator[Curve]:
    """Yield the training curves of the same stage in an earlier champion; none if both come from one training run."""
    for artifact in index.closure(champion):
        record = artifact.record
        if (record.kind, record.stage) == (entry.kind, stage) and record.version != entry.version:
            label = f", champion of {champion.record.finished:%Y-%m-%d %H:%M}"
            yield from _curves(artifact.folder, label, behind=True)


def _earlier_champions(record: RefreshRecord, index: Index) -> Iterator[Artifact]:
    """Yield other refreshes' promotion artifacts that made a champion of the same model name, newest first."""
    own = {entry.version for entry in record.stages.values()}
    names = {entry.result.tags.get("registered_model") for entry in record.stages.values()} - {None}
    promotions = [one for one in index.of_product("verdict") if one.record.version not in own]
    for artifact in sorted(promotions, key=lambda one: one.record.finished, reverse=True):
        tags = final_result(artifact.folder).tags
        if tags.get("verdict") == "promoted" and tags.get("registered_model") in names:
            yield artifact


def _curves(folder: Path, label: str, *, behind: bool) -> Iterator[Curve]:
    """Yield a curve for each learning metric (losses, rewards, …) logged in a training's folder."""
    points: dict[str, list[tuple[int, float]]] = {}
    for logged in MetricSeries(folder).steps():
        for row in filter(lambda row: is_curve(row.name), rows_of(logged)):
            points.setdefault(row.name, []).append((row.step, row.value))
    for name in sorted(points, key=lambda name: (name not in CURVES, list(points).index(name))):
        yield _curve(name, label, points[name], behind)


def _curve(metric: str, label: str, points: list[tuple[int, float]], behind: bool) -> Curve:
    return Curve(
        metric=metric,
        name=f"{metric}{label}",
        behind=behind,
        steps=tuple(step for step, _ in points),
        values=tuple(value if math.isfinite(value) else None for _, value in points),
    )


def _thinned(curve: Curve, most: int) -> Curve:
    """Return the curve with only every n-th point and the last one, at most about `most` points."""
    every = math.ceil(len(curve.steps) / most)
    last = len(curve.steps) - 1
    kept = [*range(0, last, every), last]  # the last step is the result
    return curve.model_copy(
        update={
            "steps": tuple(curve.steps[place] for place in kept),
            "values": tuple(curve.values[place] for place in kept),
            "every": every,
        }
    )


def data_of_trainings(record: RefreshRecord) -> Iterator[DataOfTraining]:
    """Yield each training's dataset shares and document lengths; older versions recorded no lengths."""
    for name, entry in record.stages.items():
        data = DataOfTraining(stage=name, lengths=tuple(_lengths(entry)), shares=tuple(_shares(entry.metrics)))
        if data.lengths or data.shares:
            yield data


def _lengths(entry: StageEntry) -> Iterator[Histogram]:
    file = entry.artifact and entry.artifact / LENGTHS_FILE
    if file and file.is_file():
        lengths = Lengths.model_validate_json(file.read_bytes())
        for dataset, counts in lengths.counts.items():
            yield Histogram(dataset=dataset, bin_tokens=lengths.bin_tokens, counts=counts)


def _shares(metrics: dict[str, float]) -> Iterator[Share]:
    for name, asked in metrics.items():
        if name.startswith(ASKED):
            dataset = name.removeprefix(ASKED)
            yield Share(dataset=dataset, asked=asked, seen=metrics.get(f"{SEEN}{dataset}"))
