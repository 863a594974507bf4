"""Steps of `lifecycle calibrate`: find measured runs, fit and write the layout planner's constants, show its errors."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.cli.run_command import ready_servers
from flows.compare.calibration import (
    CONSTANTS,
    LATENCY,
    Calibration,
    as_yaml,
    fit,
    mean_errors,
    observations_of,
    rank_correlation,
    why_left_out,
)
from flows.compare.logged import HARDWARE
from flows.ledger.home import hardware_file
from flows.ledger.machine import hardware, memory_gib, num_cores
from flows.tracking.logged_runs import LoggedRun, find_runs, measured_runs
from stages.core.errors import RecipeError
from stages.core.files import write_atomically
from stages.planner.hardware import Hardware, cpu_of, from_yaml, named_like

LEAST_RUNS = 3


def calibrate_logged(experiment: str, where: str | None, out: Path | None) -> tuple[Calibration, Path]:
    """Fit the layout planner's constants to training runs of one machine that MLflow has recorded."""
    ready_servers()
    wanted = f"tags.{HARDWARE} = '{hardware()}'" if where is None else where
    runs = [run for run in find_runs(experiment, wanted) if "model_shape" in run.tags]
    return _calibrate(runs, f"{experiment} where {wanted}", out or hardware_file())


def calibrate_measured(file: Path, out: Path) -> tuple[Calibration, Path]:
    """Fit the layout planner's constants to engine measurements by `tests/benchmarks/gpu.py`."""
    return _calibrate(measured_runs(file), file.name, out)


def _calibrate(runs: Sequence[LoggedRun], source: str, path: Path) -> tuple[Calibration, Path]:
    """Fit the planner's constants to measured runs, and write them into the machine's hardware file.

    Runs that the planner cannot predict are left out, with reasons. Raises RecipeError when there are too few runs, or
    they are of several machines.
    """
    price = from_yaml(path).price_per_device_hour if path.is_file() else None  # runs do not contain it
    start = replace(_start_of(runs, source), price_per_device_hour=price)
    observations = observations_of(runs, start)
    left_out = {f"{run.name} ({run.run_id})": why for run in runs if (why := why_left_out(run))}
    if len(observations) < LEAST_RUNS:
        raise RecipeError(
            f"calibrating with the runs of {source}: {len(observations)} have a layout, a step time "
            f"and a model whose shape is known, expected at least {LEAST_RUNS}; `lifecycle compare` makes some"
            + "".join(f"\nleft out: {name} {why}" for name, why in left_out.items())
        )
    calibration = replace(fit(observations, start), left_out=left_out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, as_yaml(calibration, start.name, source))
    return calibration, path


def as_text(calibration: Calibration, path: Path) -> str:
    """Return the layout planner's constants before and after a fit, and the prediction errors of each run, as text."""
    start, fitted = calibration.start, calibration.hardware
    values = {name: (getattr(start.efficiency, name), getattr(fitted.efficiency, name)) for name in CONSTANTS}
    values[LATENCY] = (start.intra_node_latency_s, fitted.intra_node_latency_s)
    lines = [f"{name:<22} {before:10.4g} → {after:10.4g}" for name, (before, after) in values.items()]
    lines += ["", f"{'measured s':>10}  {'before':>8}  {'after':>8}  {'GiB':>6}  {'before':>6}  {'after':>6}  layout"]
    for line in as_object(calibration, path)["runs"]:
        times = f"{line['step_time_s']:10.4g}  {line['before_s']:8.4g}  {line['after_s']:8.4g}"
        sizes = f"{line['memory_gib']:6.2f}  {line['before_gib']:6.2f}  {line['after_gib']:6.2f}"
        lines.append(f"{times}  {sizes}  {line['layout']}")
    for name, machine in (("before", start), ("after", fitted)):
        time_error, memory_error = mean_errors(calibration, machine)
        off = f"step time off by {time_error:.0%} on average, memory by {memory_error:.0%}"
        lines.append(f"{name:<6}: {off}; Spearman {rank_correlation(calibration, machine):.2f}")
    used = "is now used by predictions and `layout: auto`" if path == hardware_file() else "can be given as `--gpu`"
    lines += [f"left out: {name} {why}" for name, why in calibration.left_out.items()]
    return "\n".join([*lines, f"{path} {used}"])


def as_object(calibration: Calibration, path: Path) -> dict[str, Any]:
    """Return a fit of the layout planner's constants as the object that `lifecycle calibrate --json` prints."""
    runs = []
    for run in calibration.observations:
        before, after = run.predict(calibration.start), run.predict(calibration.hardware)
        runs.append(
            {
                "mlflow_run_id": run.run_id,
                "layout": run.text,
                "step_time_s": run.step_time_s,
                "before_s": before.time.step_time_s,
                "after_s": after.time.step_time_s,
                "memory_gib": run.memory_gib,
                "before_gib": before.memory.peak_gib,
                "after_gib": after.memory.peak_gib,
            }
        )
    machine = calibration.hardware
    return {
        "file": str(path),
        "hardware": machine.name,
        "constants": calibration.constants,
        "runs": runs,
        "left_out": calibration.left_out,
    }


def _start_of(runs: Sequence[LoggedRun], source: str) -> Hardware:
    """Return the built-in description of the runs' machine, from which the fit of the planner's constants starts."""
    machines = sorted({run.tags.get(HARDWARE, "unknown") for run in runs})
    if len(machines) > 1:
        raise RecipeError(
            f"calibrating: the runs of {source} are of {' and '.join(machines)}; take those of one (--where)"
        )
    accelerators = {run.tags["device_name"] for run in runs if run.tags.get("device") != "cpu"}
    if not accelerators:
        return replace(cpu_of(num_cores()), memory_gib=memory_gib()[1])
    known = named_like(accelerators.pop())
    if known is None:
        raise RecipeError(
            f"calibrating: no built-in description is like {machines[0]}; describe it in {hardware_file()}"
        )
    return known
