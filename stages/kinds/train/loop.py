"""Training loop: steps, learning rate, logging, held-out evaluation and checkpoints, on any engine.

A step's rows, learning rate and random numbers are functions of the seed and its number, so a resumed run does what the
uninterrupted one would have done.
"""

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.profiler import profile

from stages.core.contract import Trial, is_main_process
from stages.core.errors import TrainingError
from stages.data.batch import Batch, Signal
from stages.engines.engine import Engine, LossMeans, StepOutcome
from stages.engines.loss import Counts, Loss, Parts, Totals
from stages.kinds.train.batches import Batches, BatchSource, prefetched
from stages.kinds.train.checkpoints import Checkpoints
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.journal import Journal
from stages.kinds.train.methods.method import Method
from stages.kinds.train.metrics import Positions, Share, communication_fraction, measure_share, throughput
from stages.kinds.train.order import even_micro_batches
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
    return evaluate_held_out(run.engine, source, run.loss, run.config.learning) if source else None


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
    if final.loss > lowest * RISEN:
        run.journal.warn(f"{compared}: it has risen again. Train for fewer steps, or say `keep: best`")
    return final


def evaluation_metrics(means: LossMeans) -> dict[str, float]:
    """Return the held-out loss and metrics under names that begin with `evaluation_`."""
    return {f"evaluation_{name}": value for name, value in {"loss": means.loss, **means.metrics}.items()}


def _step_seed(run: TrainingRun, step: int) -> int:
    """Return the seed of dropout in a training step, different on processes that see different tokens."""
    return int(np.random.SeedSequence([run.config.seed, step, run.engine.token_rank]).generate_state(1)[0])


def evaluate_held_out(engine: Engine, source: BatchSource, loss: Loss, method: Method) -> LossMeans:
    """Return mean loss and metrics over all held-out rows, and for each dataset of a mixture. Collective."""
    by_name = source.dataset.member_rows
    batches = [
        source.batch([rows[index] for index in share]).with_signal(member=member)
        # never rows of two datasets in one micro-batch: `LossByDataset` counts each under its `member`
        for member, rows in enumerate(by_name.values())
        for share in even_micro_batches(len(rows), source.micro_batch_size, engine.data_rank, engine.data_parallel_size)
    ]
    whole = LossByDataset(loss, tuple(by_name)) if len(by_name) > 1 else loss
    averages = engine.evaluate(with_divergence(engine, batches), whole)
    if not method.is_likelihood:
        return averages
    abouts = {"": source.dataset.about, **{f".{name}": one.about for name, one in source.dataset.members.items()}}
    bits = {
        f"bits_per_byte{name}": bits_per_byte(
            averages.metrics[f"loss{name}"] if name else averages.loss, about.bytes_per_token
        )
        for name, about in abouts.items()
        if about.bytes_per_token is not None
    }
    return replace(averages, metrics={**averages.metrics, **bits})


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Convert a loss to bits per byte, comparable between tokenizers (Gao et al. 2020, The Pile, section 3.1)."""
    return nats_per_token / bytes_per_token / math.log(2)


@dataclass(frozen=True)
class LossByDataset:
    """Wrapper of a loss that adds its value and metrics for each dataset of a mixture: `loss.NAME` and `METRIC.NAME`.

    A micro-batch holds rows of one dataset, whose number is its `member`.
    """

    loss: Loss
    names: Sequence[str]

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return the names of all metrics: the loss's over all rows, then those of each mixture dataset."""
        own = self.loss.metric_names
        return (*own, *(f"{metric}.{name}" for name in self.names for metric in ("loss", *own)))

    def counts(self, signal: Signal) -> Counts:
        """Return the counts that the loss's means divide by, such as of pairs, for all rows and for each dataset."""
        counts = self.loss.counts(signal)
        by_dataset = {
            f"{what}.{number}": count if number == signal.member else 0
            for number in range(len(self.names))
            for what, count in counts.items()
        }
        return {**counts, **by_dataset}

    def __call__(self, token_log_probabilities: Tensor, signal: Signal, totals: Totals) -> Parts:
        """Return the micro-batch's contributions to the mean losses, over all rows and over its own dataset's rows."""
        loss, metrics = self.loss(token_log_probabilities, signal, totals)
        own_totals = {what: totals[f"{what}.{signal.member}"] for what in self.loss.counts(signal)}
        # the same micro-batch again, divided by its dataset's count instead of that of all rows
        own = self.loss(token_log_probabilities, signal, own_totals)
        by_dataset = [
            value.detach() if number == signal.member else loss.new_zeros(())
            for number in range(len(self.names))
            for value in (own[0], *own[1].values())
        ]
        names = self.metric_names
        return loss, dict(zip(names, (*metrics.values(), *by_dataset), strict=True))


def with_divergence(engine: Engine, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
    """Add KTO's estimate of the divergence from the reference model, `kl` in nats, to the micro-batches. Collective.

    It is the mean of log π/π_ref over answers to other prompts of the global batch (Ethayarajh et al. 2024, section
    4.1), at least 0. It is one number for all shares, so their forward passes come before the step.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    others = [batch.signal.mismatched for batch in micro_batches if batch.signal.mismatched]
    if not others:
        return micro_batches
    for other in others:
        assert other.signal.reference_log_probabilities is not None
        ratios = engine.document_log_probabilities(other) - other.signal.reference_log_probabilities
        # [2]: sum of log π/π_ref over the micro-batch's documents, and their number
        sums += torch.tensor([ratios.double().sum(), len(ratios)])
    total, num_documents = engine.sum_over_data(sums).tolist()
    return [batch.with_signal(kl=max(0.0, total / num_documents)) for batch in micro_batches]
