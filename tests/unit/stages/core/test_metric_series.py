"""Metrics of a stage are read correctly despite torn lines, repeated steps, NaN, and a file that still grows."""

import ast
import json
import math
import tracemalloc
from pathlib import Path

import pytest

from stages.core.metric_series import METRICS_FILE, MetricSeries, metrics_size

ROOT = Path(__file__).parents[4]
OWNER = "stages/core/metric_series.py"
WRITERS_AND_KEEPERS = {"stages/core/contract.py", "stages/kinds/train/journal.py", "flows/store/content.py"}


def write(folder, *rows, end="\n"):
    with (folder / METRICS_FILE).open("a") as stream:
        stream.write("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + end)


def row(step, **metrics):
    return {"step": step, "time_ms": 1000 + step, **metrics}


def read(series, name="loss"):
    return [(logged.step, logged.values[name]) for logged in series.steps() if name in logged.values]


def test_a_file_that_grows_is_read_on_where_reading_stopped(tmp_path):
    series = MetricSeries(tmp_path)
    assert read(series) == []  # it need not exist yet
    write(tmp_path, row(1, loss=3.0), '{"step": 2, "time_ms": 1002, "lo', end="")
    assert read(series) == [(1, 3.0)]
    position = series.position
    write(tmp_path, 'ss": 2.0}', row(3, loss=1.0))
    assert read(series) == read(MetricSeries(tmp_path, position)) == [(2, 2.0), (3, 1.0)]
    assert series.position == metrics_size(tmp_path) and read(series) == []
    assert read(MetricSeries(tmp_path, last_byte=position)) == [(1, 3.0)]


def test_of_a_step_that_is_logged_again_the_first_value_counts(tmp_path):
    write(tmp_path, row(1, loss=3.0), row(2, loss=2.0))
    resumed_at = metrics_size(tmp_path)
    again = [row(1, loss=9.0), row(2, loss=9.0, evaluation_loss=0.5), row(3, loss=1.0)]
    write(tmp_path, *again)
    series = MetricSeries(tmp_path)
    assert read(series) == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert series.last_steps == {"loss": 3, "evaluation_loss": 2}
    assert read(MetricSeries(tmp_path), "evaluation_loss") == [(2, 0.5)]
    assert read(MetricSeries(tmp_path, resumed_at, last_steps={"loss": 2})) == [(3, 1.0)]
    assert read(MetricSeries(tmp_path, resumed_at)) == [(1, 9.0), (2, 9.0), (3, 1.0)]


def test_a_diverged_loss_is_nan(tmp_path):
    write(tmp_path, row(1, loss=float("nan")), row(2, loss=float("inf")))
    (_, first), (_, second) = read(MetricSeries(tmp_path))
    assert math.isnan(first) and second == math.inf


@pytest.mark.parametrize("torn", ['{"step": 1, "time_ms": 1, "lo', '{"step": 1, "ti{"step": 2}', "\0\0"])
def test_a_line_that_a_crash_has_torn_is_left_out(tmp_path, torn):
    write(tmp_path, torn, row(2, loss=2.0))
    assert read(MetricSeries(tmp_path)) == [(2, 2.0)]


def test_memory_does_not_grow_with_the_file(tmp_path):
    write(tmp_path, *(row(step, loss=1.0, tokens_per_s=float(step)) for step in range(20_000)))
    tracemalloc.start()
    num_steps = sum(1 for _ in MetricSeries(tmp_path).steps())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_steps == 20_000 and metrics_size(tmp_path) > 1_000_000
    assert peak_bytes < 300_000


def test_the_file_is_named_and_read_by_its_reader_alone():
    namers, importers = set(), set()
    for folder in ("flows", "stages"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            text = file.read_text()
            is_named = METRICS_FILE in text or "METRICS_FILE" in text
            for node in ast.walk(ast.parse(text)) if is_named else ():
                if isinstance(node, ast.Constant) and node.value == METRICS_FILE:
                    namers.add(str(file.relative_to(ROOT)))
                if isinstance(node, ast.alias) and node.name == "METRICS_FILE":
                    importers.add(str(file.relative_to(ROOT)))
    assert namers == {OWNER}
    assert importers == WRITERS_AND_KEEPERS, "these write the file, or keep it with others"
