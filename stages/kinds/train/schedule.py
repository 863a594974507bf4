"""Learning rate as a pure function of the step: linear warm-up, then cosine, linear or constant."""

from __future__ import annotations

import math

from stages.kinds.train.config import TrainConfig


def learning_rate(config: TrainConfig, step: int, num_steps: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 1, of `num_steps`.

    Warm-up reaches the full rate at step `warmup_steps`; cosine and linear would reach
    `min_learning_rate_fraction` of it one step after the last, so no step is wasted at zero. (Transformers begins its
    warm-up at zero; after it, both are equal at every step.)
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    done = (step - 1 - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    decayed = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[config.schedule]
    floor = 0.0 if config.schedule == "constant" else config.min_learning_rate_fraction
    return config.learning_rate * (floor + (1 - floor) * decayed)
