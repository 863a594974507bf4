"""The planner's constants can be fitted to results of the accelerator benchmark as well as to MLflow runs."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from flows.cli.compare_commands import calibrate
from flows.tracking.logged_runs import measured_runs
from stages.core.errors import RecipeError
from stages.models.shape import ModelShape
from stages.parallel.layout import Layout
from stages.planner.costs import SearchRequest
from stages.planner.hardware import from_yaml, named_like
from stages.planner.search import estimate
from stages.planner.workload import Workload

SHAPE = ModelShape(28, 1024, 16, 8, 128, 3072, 151936, "qwen3", tied_embeddings=True, qk_norm=True)
DEVICE = "NVIDIA H200"


def row(name: str, engine: str = "fsdp", rows: int = 8, tokens: int = 4096, **layout: object) -> dict:
    """Return an invented benchmark result in which a training step takes twice the predicted time."""
    workload, chosen = Workload(tokens, rows), Layout.model_validate(layout)
    hardware = named_like(DEVICE)
    assert hardware
    found = estimate(
        SearchRequest(SHAPE, workload, hardware, 1), "megatron" if engine == "megatron" else "fsdp", chosen
    )
    params = {f"layout.{field}": str(value) for field, value in chosen.model_dump().items()}
    params |= {"engine": engine, "global_batch_size": str(rows), "precision": "bf16", "method": "sft"}
    params["data.sequence_length"] = str(tokens)
    metrics = {"step_time_s": 2 * found.time.step_time_s, "peak_memory_gib": found.memory.peak_gib, "mfu": None}
    tags = {"model_shape": SHAPE.to_json(), "workload": workload.to_json(), "device": "cuda", "device_name": DEVICE}
    return {"name": name, "part": {}, "status": "measured", "params": params, "metrics": metrics, "tags": tags}


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    file = tmp_path / "gpu.json"
    rows = [row("a"), row("b", micro_batch_size=4), row("c", rows=2, tokens=16384), row("d", "megatron")]
    others = [row("e", "trl"), {"name": "f", "part": {}, "status": "out of memory"}]
    file.write_text(json.dumps([*rows, *others]))
    return file


def test_runs_of_our_engines_alone_are_taken(measured: Path) -> None:
    assert [run.name for run in measured_runs(measured)] == ["a", "b", "c", "d"]


def test_the_fitted_device_is_slower_than_its_data_sheet_says(measured: Path, tmp_path: Path) -> None:
    out = tmp_path / "fitted.yaml"
    done = CliRunner().invoke(calibrate, ["--measured", str(measured), "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["runs"]) == 4
    fitted, start = from_yaml(out), named_like(DEVICE)
    assert start
    before, after = start.efficiency, fitted.efficiency
    # Steps of these runs, which are short, do not tell slow products from slow launches.
    assert after.matmul / before.matmul * (before.launch_s / after.launch_s) < 0.8
    assert f"4 runs of {measured.name}" in out.read_text()


def test_where_it_is_written_to_must_be_said(measured: Path) -> None:
    done = CliRunner().invoke(calibrate, ["--measured", str(measured)])
    assert done.exit_code == 2
    assert "--out" in done.stderr


def test_another_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"status": 1}')
    with pytest.raises(RecipeError, match=r"other\.json: .*expected the gpu\.json"):
        measured_runs(tmp_path / "other.json")
