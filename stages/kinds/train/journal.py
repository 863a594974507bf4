"""Log of a training run: metrics by step, progress, warnings, a summary, and a picture of the loss curve."""

import importlib.util
import math
import statistics
import time
from pathlib import Path
from typing import Any

from stages.core.contract import StageContext, is_main_process
from stages.core.files import remove_cut_off_line
from stages.core.metric_series import METRICS_FILE, MetricSeries

PROGRESS_EVERY_S = 0.5
MUCH_COMMUNICATION = 0.3
"""Share of a training step spent in collectives above which a warning is given."""
MUCH_REST = 0.03
"""Mean probability that a teacher gives to tokens beyond its top k, above which a warning is given."""
PER_STEP = (
    "step_time_s",
    "tokens_per_s",
    "real_tokens_per_s",
    "tokens_per_s_per_device",
    "real_tokens_per_s_per_device",
    "mfu",
    "data_wait_fraction",
)
"""Metrics that are measured in every training step; a run's final value of each is the median."""

Metrics = dict[str, float]


class Journal:
    """Log of one attempt at a training: metrics by step, progress and warnings; repeated steps are not logged again."""

    def __init__(self, context: StageContext, num_steps: int, log_every_steps: int) -> None:
        self._context = context
        self._num_steps = num_steps
        self._log_every_steps = log_every_steps
        if is_main_process():
            remove_cut_off_line(context.work / METRICS_FILE)
        self.rows = [{"step": logged.step, **logged.values} for logged in MetricSeries(context.work).steps()]
        """Metrics logged by this and all earlier attempts of the stage: a dictionary for each logged training step."""
        self._last_logged_step = max((int(row["step"]) for row in self.rows), default=0)
        self._last_progress_s = 0.0
        self._attempt: list[Metrics] = []
        self._has_warned_of_rest = False

    def is_due(self, step: int) -> bool:
        return step % self._log_every_steps == 0 or step in (1, self._num_steps)

    def log(self, step: int, metrics: Metrics) -> None:
        """Log a training step's metrics; warn of much communication, or if a teacher's top k covers too little."""
        self._attempt.append(metrics)
        if step > self._last_logged_step:
            self._context.log_metrics(step, metrics)
            self.rows.append({"step": step, **metrics})
            self._last_logged_step = step
        if metrics.get("communication_fraction", 0) > MUCH_COMMUNICATION:
            self._context.warn(
                f"collectives ran during {metrics['communication_fraction']:.0%} of step {step}; larger micro-batches, "
                "fewer processes or reshard_after_forward: false would lower that"
            )
        if metrics.get("teacher_rest", 0) > MUCH_REST and not self._has_warned_of_rest:
            self._has_warned_of_rest = True
            self._context.warn(
                f"in step {step} the teacher gave {metrics['teacher_rest']:.1%} of its probability to tokens beyond "
                "its likeliest distill.loss_top_k, which count as one token: how it divides that among them is not "
                "learned. Raise loss_top_k"
            )

    def progress(self, step: int, loss: float) -> None:
        """Report the training's current step and loss to the user, at most every half second."""
        now_s = time.monotonic()
        if step == self._num_steps or now_s - self._last_progress_s > PROGRESS_EVERY_S:
            self._context.progress(step, self._num_steps, "steps", f"loss {loss:.4f}{self._rate()}")
            self._last_progress_s = now_s

    def lowest_evaluation(self, upto_step: int) -> tuple[float, int]:
        rows = (row for row in self.rows if row["step"] <= upto_step and "evaluation_loss" in row)
        return min(((row["evaluation_loss"], int(row["step"])) for row in rows), default=(math.inf, 0))

    def warn(self, message: str) -> None:
        """Report a warning of the training."""
        self._context.warn(message)

    def milestone(self, message: str) -> None:
        self._context.milestone(message)

    def summary(self) -> Metrics:
        """Return this attempt's metrics: last values, or for those in `PER_STEP` medians without the first 3 steps."""
        if not self._attempt:
            return {}
        # a run of 3 steps or fewer keeps its last one
        steady = self._attempt[min(3, len(self._attempt) - 1) :]
        medians = {
            name: statistics.median(metrics[name] for metrics in steady) for name in PER_STEP if name in steady[0]
        }
        # A later step's value replaces an earlier one's; a metric that not every step has keeps its last.
        latest = {name: value for metrics in self._attempt for name, value in metrics.items()}
        return {**latest, **medians}

    def _rate(self) -> str:
        return f", {self._attempt[-1]['real_tokens_per_s']:,.0f} tokens/s" if self._attempt else ""


SERIES = {"loss": "training", "evaluation_loss": "held out"}


def plot_loss(rows: list[dict[str, Any]], path: Path) -> bool:
    """Draw training and held-out loss over the training steps, as a PNG file. rows: a journal's metrics by step.

    Returns False where Matplotlib is not installed: a picture is not worth the training that it would fail.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib import artist

    # Matplotlib builds a docstring of all setters for each class at import, which takes longer than the picture.
    vars(artist)["kwdoc"] = lambda _: ""
    setattr(artist.Artist, "_update_set_signature_and_docstring", lambda: None)  # noqa: B010 (private: not in its stubs)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, label in SERIES.items():
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker="o" if len(points) < 20 else None)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats)")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return True
