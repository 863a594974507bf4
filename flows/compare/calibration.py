"""Calibration of the planner: constants of a machine's efficiency, fitted to earlier runs logged in MLflow.

Least squares over the logarithms of predicted over measured step time and memory. A run or two cannot determine all
constants, so each is also held near its built-in value: being off by a factor of e weighs as much as one run that is
predicted wrongly by that factor (a log-normal prior). The module does no I/O.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flows.tracking.logged_runs import LoggedRun
from stages.kinds.train.methods.registry import METHODS
from stages.models.shape import ModelShape
from stages.parallel.layout import ENGINES, EngineName, Layout, describe_layout
from stages.planner.costs import SearchRequest
from stages.planner.hardware import Hardware, shared_cpu
from stages.planner.search import Candidate, estimate
from stages.planner.workload import Workload

TIME_CONSTANTS = ("matmul", "attention", "memory", "intra_link", "launch_s")
MEMORY_CONSTANTS = ("runtime_gib",)
CONSTANTS = (*TIME_CONSTANTS, *MEMORY_CONSTANTS)
SHARES = ("matmul", "attention", "memory", "intra_link")
"""Names of the fitted constants that are a share of a peak rate, and so at most 1."""
LATENCY = "intra_node_latency_s"
WORKLOAD = "workload"
"""MLflow tag in which a train stage records the workload for which the planner made its prediction."""
WIDEST_FACTOR = 100.0
FITTED_FROM = ("engine", "layout.dp_shard", "global_batch_size", "data.sequence_length", "precision")


@dataclass(frozen=True)
class Observation:
    """Measured step time and memory of one run, with what the planner needs to predict them."""

    run_id: str
    request: SearchRequest
    """Search request for the whole machine; on a CPU, `predict` divides the cores among the run's processes."""
    engine: EngineName
    layout: Layout
    is_cpu: bool
    step_time_s: float
    memory_gib: float

    @property
    def text(self) -> str:
        """Return the measured run's layout and batch (rows × tokens) in one line."""
        rows = self.request.workload.global_batch_size
        return f"{describe_layout(self.engine, self.layout)} ({rows} × {self.request.workload.sequence_length})"

    def predict(self, hardware: Hardware) -> Candidate:
        """Predict the measured run's step time and memory on hardware with the given efficiency constants."""
        share = shared_cpu(hardware, self.layout.world_size) if self.is_cpu else hardware
        return estimate(replace(self.request, hardware=share), self.engine, self.layout)


@dataclass(frozen=True)
class Calibration:
    """Result of a calibration: hardware with fitted constants, and the runs that they were fitted to."""

    hardware: Hardware
    start: Hardware
    observations: tuple[Observation, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Reasons why runs could not be used for the calibration, by name of the run."""

    @property
    def constants(self) -> dict[str, float]:
        """Return the fitted efficiency constants by name, with the latency of a collective within a node."""
        return {**{name: getattr(self.hardware.efficiency, name) for name in CONSTANTS}, LATENCY: self.latency_s}

    @property
    def latency_s(self) -> float:
        """Return the fitted latency in seconds of a collective within a node."""
        return self.hardware.intra_node_latency_s


def observations_of(runs: Sequence[LoggedRun], hardware: Hardware) -> list[Observation]:
    """Return measured step time and memory of each usable train run, with all that is needed to predict them."""
    return [_observation(run, hardware) for run in runs if why_left_out(run) is None]


def why_left_out(run: LoggedRun) -> str | None:
    """Return why a run cannot be used for calibration, such as a metric that it lacks; None for a usable run."""
    lacking = [name for name in ("step_time_s", "peak_memory_gib") if not run.metrics.get(name, 0) > 0]
    lacking += [name for name in ("model_shape",) if name not in run.tags]
    lacking += [name for name in FITTED_FROM if name not in run.params]
    if lacking:
        return f"has no {', '.join(lacking)}"
    if run.params["engine"] not in ENGINES:
        return f"is of the engine {run.params['engine']}, which this version does not have"
    if WORKLOAD in run.tags:
        return None
    adapts = any(name.startswith("adapter.") for name in run.params)
    method = METHODS.get(run.params.get("method", ""))
    if adapts or method is None or method.options:
        what = "its adapter" if adapts else f"the passes of its method ({run.params.get('method', 'unknown')})"
        return f"is of a version that does not record {what} for the planner; run it again"
    return None


def fit(observations: Sequence[Observation], start: Hardware) -> Calibration:
    """Fit the hardware constants to measured runs by least squares, held near the constants of `start`."""
    from scipy.optimize import least_squares

    values = {name: getattr(start.efficiency, name) for name in CONSTANTS} | {LATENCY: start.intra_node_latency_s}
    names = list(values)
    widest = math.log(WIDEST_FACTOR)
    # A share of a peak is at most 1; the small number keeps the start within its bounds.
    upper = [min(widest, math.log(1 / values[name]) + 1e-9) if name in SHARES else widest for name in names]

    def residuals(logs: Sequence[float]) -> list[float]:
        hardware = with_constants(
            start, {name: values[name] * math.exp(log) for name, log in zip(names, logs, strict=True)}
        )
        # The logarithms of the factors are residuals themselves: the prior that holds constants near their start.
        return [*(error for one in observations for error in errors(one, hardware)), *logs]

    solution = least_squares(residuals, [0.0] * len(names), bounds=([-widest] * len(names), upper))
    best = {name: values[name] * math.exp(log) for name, log in zip(names, solution.x, strict=True)}
    return Calibration(with_constants(start, best), start, tuple(observations))


def with_constants(hardware: Hardware, values: Mapping[str, float]) -> Hardware:
    """Return hardware with the given efficiency constants, and the given latency of a collective within a node."""
    efficiency = replace(hardware.efficiency, **{name: values[name] for name in CONSTANTS})
    return replace(hardware, efficiency=efficiency, intra_node_latency_s=values[LATENCY])


def errors(observation: Observation, hardware: Hardware) -> tuple[float, float]:
    """Return log(predicted / measured) of a run's step time and memory, the errors that the calibration minimizes."""
    candidate = observation.predict(hardware)
    return (
        math.log(candidate.time.step_time_s / observation.step_time_s),
        math.log(candidate.memory.peak_gib / observation.memory_gib),
    )


def rank_correlation(calibration: Calibration, hardware: Hardware) -> float:
    """Return Spearman's rank correlation of predicted and measured step times; NaN for fewer than two runs."""
    from scipy.stats import spearmanr

    if len(calibration.observations) < 2:
        return math.nan
    predicted = [one.predict(hardware).time.step_time_s for one in calibration.observations]
    return float(spearmanr(predicted, [one.step_time_s for one in calibration.observations]).statistic)


def mean_errors(calibration: Calibration, hardware: Hardware) -> tuple[float, float]:
    """Return the mean relative errors |predicted / measured - 1| of step time and of memory."""
    times, memories = zip(*(errors(run, hardware) for run in calibration.observations), strict=True)
    return _mean_error(times), _mean_error(memories)


def as_yaml(calibration: Calibration, like: str, source: str) -> str:
    """Return the fitted hardware file as YAML, with comments on the runs behind it."""
    start, fitted = mean_errors(calibration, calibration.start), mean_errors(calibration, calibration.hardware)
    machine = calibration.hardware
    lines = [
        f"# Written by `lifecycle calibrate`: fitted to {len(calibration.observations)} runs of {source}.",
        f"# Mean error of the step time {start[0]:.0%} → {fitted[0]:.0%}, of memory {start[1]:.0%} → {fitted[1]:.0%}.",
        f"name: {machine.name}",
        f"like: {like}",
        f"bf16_tflops: {machine.bf16_tflops:.4g}",
        f"fp32_tflops: {machine.fp32_tflops:.4g}",
        f"memory_gib: {machine.memory_gib:.4g}",
        f"num_processors: {machine.num_processors}",
        f"{LATENCY}: {calibration.latency_s:.4g}",
        *([f"price_per_device_hour: {machine.price_per_device_hour}"] if machine.price_per_device_hour else []),
        "efficiency:",
        *(f"  {name}: {getattr(machine.efficiency, name):.4g}" for name in CONSTANTS),
    ]
    return "\n".join([*lines, ""])


def _observation(run: LoggedRun, hardware: Hardware) -> Observation:
    params = run.params
    fields = {name: params[f"layout.{name}"] for name in Layout.model_fields if f"layout.{name}" in params}
    layout = Layout.model_validate_strings(fields)
    return Observation(
        run_id=run.run_id,
        request=SearchRequest(
            ModelShape.from_json(run.tags["model_shape"]), _workload(run), hardware, layout.world_size
        ),
        engine=next(engine for engine in ENGINES if engine == params["engine"]),
        layout=layout,
        is_cpu=run.tags.get("device") == "cpu",
        step_time_s=run.metrics["step_time_s"],
        memory_gib=run.metrics["peak_memory_gib"],
    )


def _workload(run: LoggedRun) -> Workload:
    """Return a run's workload from its MLflow tags; of old runs without, one epoch that trains the whole model."""
    if WORKLOAD in run.tags:
        return Workload.from_json(run.tags[WORKLOAD])
    return Workload(
        sequence_length=int(run.params["data.sequence_length"]),
        global_batch_size=int(run.params["global_batch_size"]),
        precision="fp32" if run.params["precision"] == "fp32" else "bf16",
    )


def _mean_error(logs: Sequence[float]) -> float:
    return sum(abs(math.exp(log) - 1) for log in logs) / len(logs)
