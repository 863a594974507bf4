"""Training loop: steps, learning rate, logging, held-out evaluation and checkpoints, on any engine.

A step's rows, learning rate and random numbers are functions of the seed and its number, so a resumed run does what the
uninterrupted one would have done.
"""

import math
import time
from collections.abc import Callable, Generator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch.profiler import profile

from stages.core.contract import Trial, is_main_process
from stages.core.errors import TrainingError
from stages.engines.engine import Engine, LossMeans, StepOutcome
from stages.engines.loss import Loss
from stages.kinds.train.batches import Batches, prefetched, with_divergence
from stages.kinds.train.checkpoints import Checkpoints
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.journal import Journal
from stages.kinds.train.metrics import Positions, Share, communication_fraction, measure_share, throughput
from stages.kinds.train.watchdog import Watchdog
from stages.parallel.accelerator import of_device
from stages.parallel.devices import Peak

PROFILED_STEP = 3
"""Training step of each attempt, counted from 1, in which collectives are timed: late enough to be typical."""
RISEN = 1.02
"""Ratio of the last held-out loss to the lowest above which a rise is reported; smaller rises are noise of few rows."""


@dataclass(frozen=True)
class TrainingRun:
    """State of a training run that the training loop works with: engine, loss, data, checkpoints and metric log."""

    config: TrainConfig
    engine: Engine
    loss: Loss
    batches: Batches
    num_steps: int
    checkpoints: Checkpoints
    journal: Journal
    peak: Peak | None
    watchdog: Watchdog
    trial: Trial | None = None
    positions: Positions = field(default_factory=Positions)

    def close(self) -> None:
        self.batches.close()

    @property
    def last_step(self) -> int:
        """Training step to stop after: `num_steps`, or fewer in a trial run, which only measures."""
        return self.trial.steps if self.trial else self.num_steps

    @property
    def checkpoint_every_steps(self) -> int:
        """Training steps between checkpoints, by default a tenth of the run, rounded up to whole sampling rounds."""
        wanted = self.config.execution.checkpoint_every_steps or math.ceil(self.num_steps / 10)
        return math.ceil(wanted / self.batches.steps_together) * self.batches.steps_together


def train(run: TrainingRun) -> LossMeans | None:
    """Train from the latest checkpoint, or from the start, to the last step; return the held-out evaluation.

    Raises TrainingError, with the step, when loss or gradient norm is not finite.
    """
    run.watchdog.begins("reading the latest checkpoint")
    done_steps = run.checkpoints.load_latest()
    if done_steps:
        run.journal.milestone(f"continuing from the checkpoint of step {done_steps}")
        _, run.checkpoints.best_step = run.journal.lowest_evaluation(done_steps)
    steps = range(done_steps + 1, run.last_step + 1)
    with closing(_shares(run, steps)) as shares:
        for step in steps:
            run.watchdog.begins_step(step)
            # one device has no collectives
            is_profiled = run.engine.num_devices > 1 and is_main_process() and step == done_steps + PROFILED_STEP
            _train_one_step(run, step, shares.__next__, is_profiled)
        run.watchdog.begins("the last checkpoint and the evaluation")
        run.checkpoints.wait()
        last = evaluate(run)
        kept = _choose_weights(run, last)
        if last:
            # The curve shows the last step's loss, whichever step's weights are kept.
            run.journal.rows.append({"step": run.last_step, **evaluation_metrics(last)})
        return kept


def evaluate(run: TrainingRun) -> LossMeans | None:
    """Return loss and metrics over the held-out rows; None when there are none."""
    source = run.batches.held_out
    return source.evaluate(run.engine, run.loss, run.config.learning) if source else None


def learning_rate(config: TrainConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 1, of `num_steps`.

    Warm-up reaches the full rate at step `warmup_steps`; decay would reach its minimum one step after the last,to waste
    none.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    # 0 in the first step after warm-up, still below 1 in the last
    done = (step - 1 - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    decayed = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[config.schedule]
    floor = 0.0 if config.schedule == "constant" else config.min_learning_rate_fraction
    return config.learning_rate * (floor + (1 - floor) * decayed)


def _train_one_step(run: TrainingRun, step: int, next_share: Callable[[], Share], is_profiled: bool) -> None:
    start_s = time.perf_counter()
    share = next_share()
    wait_s = time.perf_counter() - start_s
    run.positions.add(share)
    rate = learning_rate(run.config, step, run.num_steps)
    torch.manual_seed(_step_seed(run, step))  # a resumed run drops out the same activations
    outcome, update_s, communication = _update(run, share, rate, is_profiled)
    run.watchdog.has_stepped()
    _stop_if_diverged(run, step, outcome)  # before a checkpoint could hold broken weights
    # before the evaluation, which may keep this very checkpoint as the best
    _save_if_due(run, step)
    evaluation = _evaluate_if_due(run, step)
    run.journal.progress(step, outcome.loss)
    if evaluation or run.journal.is_due(step):
        metrics = {"loss": outcome.loss, "learning_rate": rate, "grad_norm": outcome.grad_norm, **outcome.metrics}
        # `throughput` is collective: `is_due` is a function of the step, so all processes come here together.
        metrics |= {**outcome.measured, **run.batches.metrics(step, update_s)}
        rates = throughput(run.engine, share, wait_s + update_s, wait_s, run.peak)
        run.journal.log(step, {**metrics, **rates, **communication, **evaluation})


def _update(
    run: TrainingRun, share: Share, rate: float, is_profiled: bool
) -> tuple[StepOutcome, float, dict[str, float]]:
    """Make one optimizer step; return its outcome, its seconds and, if profiled, the share of time in collectives."""
    with profile() if is_profiled else nullcontext() as profiled:
        start_s = time.perf_counter()
        micro_batches = with_divergence(run.engine, share.micro_batches)
        outcome = run.engine.train_step(micro_batches, run.loss, rate, run.config.max_grad_norm)
        update_s = time.perf_counter() - start_s
    if profiled is None:
        return outcome, update_s, {}
    return outcome, update_s, {"communication_fraction": communication_fraction(profiled, update_s)}


def _shares(run: TrainingRun, steps: range) -> Generator[Share]:
    """Yield this process's micro-batches of every training step, prepared one step ahead by a thread where possible.

    Those made ahead are in pinned memory where the device copies from it, so that copies overlap with computation.
    """
    pins = of_device(run.engine.device).pins_host_memory

    def load(step: int) -> Share:
        return measure_share(run.batches.micro_batches(step), run.engine.flops)

    def load_ahead(step: int) -> Share:
        share = load(step)
        return replace(share, micro_batches=[one.pinned() for one in share.micro_batches]) if pins else share

    return prefetched(load_ahead, steps) if run.batches.made_ahead else (load(step) for step in steps)


def _stop_if_diverged(run: TrainingRun, step: int, outcome: StepOutcome) -> None:
    if math.isfinite(outcome.loss) and math.isfinite(outcome.grad_norm):
        return
    run.checkpoints.wait()  # the one being written is of an earlier step, so it is sound
    raise TrainingError(
        f"step {step}: the loss is {outcome.loss} and the gradient norm {outcome.grad_norm}; expected finite "
        "numbers; lower learning_rate, lengthen warmup_steps, lower max_grad_norm, or look at the data of this step"
    )


def _save_if_due(run: TrainingRun, step: int) -> None:
    run.checkpoints.poll()
    if run.trial is None and (step % run.checkpoint_every_steps == 0 or step == run.num_steps):
        run.watchdog.begins(f"the checkpoint of step {step}")
        run.batches.settle()
        run.checkpoints.save(step)


def _evaluate_if_due(run: TrainingRun, step: int) -> dict[str, float]:
    every_steps = run.config.execution.evaluate_every_steps
    if not every_steps or step % every_steps or step == run.num_steps:
        return {}
    run.watchdog.begins(f"the evaluation after step {step}")
    held_out = evaluate(run)
    if held_out is None:
        return {}
    if run.config.keep == "best" and run.trial is None:
        lowest, _ = run.journal.lowest_evaluation(step - 1)
        # Saving is collective, so all processes follow rank 0.
        if run.engine.broadcast_from_rank0(held_out.loss < lowest):
            run.checkpoints.save_best(step)
    return evaluation_metrics(held_out)


def _choose_weights(run: TrainingRun, final: LossMeans | None) -> LossMeans | None:
    """Load the best step's weights with `keep: best`, else warn of a risen loss; return the kept ones' evaluation."""
    lowest, step = run.journal.lowest_evaluation(run.last_step)
    # `lowest` is inf without an evaluation on the way. All follow rank 0, since loading a checkpoint is collective.
    if final is None or run.trial or not run.engine.broadcast_from_rank0(final.loss > lowest):
        return final
    compared = f"the held-out loss is {final.loss:.4g} after the last step, and was {lowest:.4g} at step {step}"
    if run.config.keep == "best":
        run.journal.milestone(f"{compared}: keeping that step's weights")
        run.watchdog.begins(f"the checkpoint of step {step}")
        run.checkpoints.load(int(run.engine.broadcast_from_rank0(step)))
        return evaluate(run)
    if final.loss - lowest > (RISEN - 1) * abs(lowest):
        run.journal.warn(f"{compared}: it has risen again. Train for fewer steps, or say `keep: best`")
    return final


def evaluation_metrics(means: LossMeans) -> dict[str, float]:
    """Return the held-out loss and metrics under names that begin with `evaluation_`."""
    return {f"evaluation_{name}": value for name, value in {"loss": means.loss, **means.metrics}.items()}


def _step_seed(run: TrainingRun, step: int) -> int:
    """Return the seed of dropout in a training step, different on processes that see different tokens."""
    return int(np.random.SeedSequence([run.config.seed, step, run.engine.token_rank]).generate_state(1)[0])
