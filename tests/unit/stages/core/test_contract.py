"""Interface of stage processes: a config's inputs, the fields that decide its version, and the work folder's files."""

import importlib
import inspect
import json
import math
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from stages.core.contract import (
    DatasetReference,
    Execution,
    ModelReference,
    OutsidePath,
    Product,
    ProgressLines,
    StageConfig,
    StageContext,
    StageResult,
    StrictModel,
)
from stages.core.errors import INTERNAL_ERROR, USAGE_ERROR, LifecycleError, error_classes
from stages.kinds.registry import KINDS


class Inner(StrictModel):
    rows: DatasetReference
    template: OutsidePath | None = None
    size: int = 3


class Example(StageConfig):
    STAGE_VERSION: ClassVar[int] = 1

    kind: Literal["example"] = "example"
    model: ModelReference
    baseline: ModelReference | None = None
    inner: Inner
    folder: OutsidePath | None = None
    words: tuple[str, ...] = ("a",)

    @property
    def product(self) -> Product:
        return "model"


@pytest.fixture
def context(tmp_path) -> StageContext:
    return StageContext(tmp_path, "example", "0" * 12, {}, {}, tmp_path / "cache")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_references_and_outside_paths_are_found_at_any_depth():
    config = Example(model="base", inner={"rows": "problems", "template": "t.jinja"}, folder="x/y")
    assert config.references() == {"model": "base", "inner.rows": "problems"}
    assert config.outside_paths() == {"inner.template": Path("t.jinja"), "folder": Path("x/y")}


def test_the_identity_holds_defaults_but_no_names_paths_or_execution():
    config = Example(model="base", inner={"rows": "problems"}, folder="x/y", execution=Execution(timeout_s=3))
    identity = {"kind": "example", "baseline": None, "inner": {"template": None, "size": 3}, "words": ["a"]}
    assert config.identity() == identity


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_describes_itself(kind):
    config = KINDS[kind]
    assert config.model_fields["kind"].annotation == Literal[kind]
    assert config.STAGE_VERSION >= 1
    assert issubclass(config.model_fields["execution"].annotation, Execution)
    assert not config.model_fields["execution"].is_required()


def test_every_error_class_has_an_exit_code_of_its_own():
    codes = {name: error.exit_code for name, error in error_classes().items() if error is not LifecycleError}
    assert len(set(codes.values())) == len(codes)
    assert not {0, 1, USAGE_ERROR, INTERNAL_ERROR} & set(codes.values())
    assert all(code < 126 for code in codes.values()), "the shell means something else by these"


def test_metrics_and_events_are_lines_of_json(context):
    context.log_metrics(3, {"loss": 0.5})
    context.progress(1, 10, "steps")
    context.milestone("half way")
    context.warn("slow")
    assert [(row["step"], row["loss"]) for row in lines(context.work / "metrics.jsonl")] == [(3, 0.5)]
    events = lines(context.work / "events.jsonl")
    assert [event["event"] for event in events] == ["progress", "milestone", "warning"]
    assert (events[0]["done"], events[0]["total"], events[0]["unit"]) == (1, 10, "steps")


def test_only_the_main_process_writes(context, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    context.log_metrics(3, {"loss": 0.5})
    context.milestone("half way")
    assert list(context.work.iterdir()) == []


def test_a_diverged_loss_survives_the_result_file():
    result = StageResult(metrics={"loss": math.nan, "grad_norm": math.inf})
    read = StageResult.model_validate_json(result.model_dump_json())
    assert math.isnan(read.metrics["loss"])
    assert read.metrics["grad_norm"] == math.inf


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_runs_by_the_config_that_recipes_have_of_it(kind):
    """Each stage kind's `run` takes its config class, which a stage process finds by this annotation."""
    run = importlib.import_module(f"stages.kinds.{kind}.run").run
    assert inspect.get_annotations(run, eval_str=True)["config"] is KINDS[kind]


def test_a_log_has_a_line_a_minute_on_progress():
    lines = ProgressLines()
    shown = [lines.line(float(second), second, 600, "steps", f"loss {second}") for second in range(100, 301)]
    assert [line[9:] for line in shown if line] == [
        "160 of 600 steps, loss 160, 0:07:20 left",
        "220 of 600 steps, loss 220, 0:06:20 left",
        "280 of 600 steps, loss 280, 0:05:20 left",
    ]
