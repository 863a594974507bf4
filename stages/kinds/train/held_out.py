"""What the model is worth on rows that are held out: loss and metrics, of a mixture by dataset as well."""

from __future__ import annotations

import math
from dataclasses import replace

from stages.engines.engine import Engine, LossMeans
from stages.engines.loss import Loss
from stages.kinds.train.batches import BatchSource
from stages.kinds.train.divergence import with_divergence
from stages.kinds.train.loss_by_dataset import LossByDataset
from stages.kinds.train.methods.method import Method
from stages.kinds.train.order import even_micro_batches


def evaluate_held_out(engine: Engine, source: BatchSource, loss: Loss, method: Method) -> LossMeans:
    """Means over all rows of `source`. Collective."""
    by_name = source.dataset.member_rows
    batches = [
        replace(source.batch([rows[index] for index in share]), member=member)
        for member, rows in enumerate(by_name.values())
        for share in even_micro_batches(len(rows), source.micro_batch_size, engine.data_rank, engine.data_parallel_size)
    ]
    whole = LossByDataset(loss, tuple(by_name)) if len(by_name) > 1 else loss
    means = engine.evaluate(with_divergence(engine, batches), whole)
    if not method.is_likelihood:
        return means
    abouts = {"": source.dataset.about, **{f".{name}": one.about for name, one in source.dataset.members.items()}}
    bits = {
        f"bits_per_byte{name}": bits_per_byte(
            means.metrics[f"loss{name}"] if name else means.loss, about.bytes_per_token
        )
        for name, about in abouts.items()
        if about.bytes_per_token is not None
    }
    return replace(means, metrics={**means.metrics, **bits})


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """A loss that compares models with different tokenizers: Gao et al. 2020 (The Pile), section 3.1."""
    return nats_per_token / bytes_per_token / math.log(2)
