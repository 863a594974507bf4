"""Function of a model for the logits of its output head, as measured: it scales them, caps them softly, or neither.

The model's own code is run between a decoder that gives chosen numbers and a head that passes them on, so that no
weight is read, and no architecture has to be known by its name. What is neither a scale nor a soft cap is left to the
comparison with Transformers on the model's weights (`fsdp/model.py`).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stages.engines.log_probabilities import LogitsTransform
from stages.models.layers import decoder_of

SMALL, LARGE = 2.0**-30, 2.0**30
"""Logits of which a soft cap leaves the first as it is, and makes the last the cap."""
BETWEEN = (-30.0, -2.0, 0.5, 7.0)
"""Logits that show whether it is a soft cap."""
TOLERANCE = 1e-5
"""Relative difference below which numbers are one: some code computes them in fp32."""


@torch.no_grad()
def logits_transform(causal_lm: Any) -> LogitsTransform:
    """Return what a causal language model, also one without weights, does to its head's logits z.

    It is scale × z (Cohere, Granite) or a soft cap, cap × tanh(scale × z / cap) (Gemma 2).
    """
    logits = torch.tensor((SMALL, *BETWEEN, LARGE), dtype=torch.float64)
    try:
        small, *between, large = _transformed(causal_lm, logits).tolist()
    except Exception:  # of code that wants more of its decoder than states: its logits are compared with the weights
        return LogitsTransform()
    slope = small / SMALL
    if _is_near(large, slope * LARGE):
        return LogitsTransform(slope)
    # Of a tanh, which rounds: a cap alone is to have the slope 1 exactly.
    scale = 1.0 if _is_near(slope, 1.0) else slope
    found = LogitsTransform(scale, large / scale)
    expected = found(logits[1:-1]).tolist()
    return found if all(map(_is_near, between, expected)) else LogitsTransform()


def _is_near(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=TOLERANCE)


def _transformed(causal_lm: Any, logits: Tensor) -> Tensor:
    """Return what the model makes of logits [number] that its head gives."""
    decoder, head = decoder_of(causal_lm), causal_lm.get_output_embeddings()
    states = logits[None, :, None]
    token_ids = torch.zeros(1, len(logits), dtype=torch.int64)
    with _giving(decoder, lambda *_, **__: _Output(states)), _giving(head, lambda states: states):
        output: Tensor = causal_lm(input_ids=token_ids, use_cache=False).logits
    return output.double().flatten()


class _Output:
    """Output of a decoder that has last hidden states, and nothing else."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, place: int) -> Tensor:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        """Have no other field: no cache, no attention weights."""


@contextmanager
def _giving(module: nn.Module, forward: Any) -> Iterator[None]:
    """Let a module give something else in this context."""
    own = vars(module).get("forward")  # of one whose weights are on disk
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own
