"""Description of a training method: options, loss, and what it needs of data, engine, planner and training loop.

A method is a module beside this one and a line in `registry.py`; no caller asks which method it is. Modules of methods
are light: the recipe is read without torch, so losses import it where they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import Field

from stages.core.fields import StrictModel
from stages.data.config import RowKind
from stages.kinds.train.methods.rollouts import SamplingOptions
from stages.planner.workload import ExtraPasses

if TYPE_CHECKING:
    from stages.data.batch import Batch
    from stages.engines.loss import Loss

BatchChange = Callable[["Batch"], "Batch"]
"""Change by a training method of each batch's targets or weights; its `repr` is in a cache key, so it must say all."""


class TeacherServer(StrictModel):
    """Config of a teacher's server, whose vLLM API returns the likeliest tokens at each position of a prompt."""

    url: str = Field(
        pattern=r"^https?://[^\s/@]+(/\S*)?/v1/?$", description="Address of the teacher's server, including `/v1`."
    )
    served_model: str = Field(
        min_length=1,
        description="Name of the teacher's model on the server; answers are cached under it, so other weights need "
        "another name.",
    )
    key_variable: str | None = Field(
        None, pattern=r"^[A-Za-z_]\w*$", description="Environment variable with the server's API key; default: no key."
    )


@dataclass(frozen=True)
class TeacherTokens:
    """Request for a teacher's likeliest tokens, with log-probabilities, at every target token."""

    number: int
    temperature: float
    """Divisor of the teacher's and the model's logits in the loss."""
    server: TeacherServer | None = None
    """Server that runs the teacher; None: the teacher's model comes from a stage."""


@dataclass(frozen=True)
class OnPolicySteps:
    """Training steps that learn from the model's own answers to the rows' prompts, not from the rows' answers."""

    share: float
    sampling: SamplingOptions


@dataclass(frozen=True)
class Method:
    """Description of a training method: its options, its loss, and what it needs of data, engine and training loop.

    Functions in its fields get the method's options from the recipe, or None where it has none.
    """

    name: str
    """Name of the method in a recipe's `method:`, and of the recipe's field that holds its options."""
    rows: RowKind
    """Kind of data that the method learns from: examples, preference pairs, labelled answers or prompts."""
    build_loss: Callable[[Any], Loss]
    options: type[StrictModel] | None = None
    """Config class of the method's options, all of which have defaults; None: no options."""
    needs_reference: Callable[[Any], bool] = lambda _: False
    """True if the loss needs the untrained model's log-probabilities of the documents, as a reference."""
    batch_change: Callable[[Any], BatchChange | None] = lambda _: None
    """Change that the method makes to each batch's target tokens or their weights; None: none."""
    needs_divergence: Callable[[Any], bool] = lambda _: False
    """True if the loss needs an estimate of the divergence from the reference model (`loop.with_divergence`)."""
    asks_teacher: Callable[[Any], TeacherTokens | None] = lambda _: None
    """Request for a teacher's likeliest tokens at every target; None for a method without a teacher."""
    on_policy: Callable[[Any], OnPolicySteps | None] = lambda _: None
    """Training steps that learn from the model's own answers, scored by a teacher; None: no such steps."""
    needs_rollouts: bool = False
    """True if the method learns only from sampled answers that rewards judge; its options are then `RolloutOptions`."""
    needs_score_head: bool = False
    """True if the method trains a reward model, which gives one score per document instead of token probabilities."""
    reads_margins: bool = False
    metrics: Mapping[str, str] = field(default_factory=dict)
    averaged_over: str = "target tokens"
    """Noun for what the method's loss is averaged over, such as `pairs`."""
    is_likelihood: bool = False
    """True if the loss is the negative log-likelihood of the target tokens, in nats a token."""
    teaches_tokens: bool = False
    """True if the method can teach tokens that the model did not have before (`data.add_tokens`)."""
    usual_learning_rates: tuple[tuple[float, float], ...] = ()
    """Usual peak learning rates of AdamW for training all weights: (largest size in billions of parameters, rate)."""
    headline: tuple[str, ...] = ()
    """Names of the method's metrics that are shown first in a run's results."""
    is_null_in_identity: bool = False
    """True if cache keys of stages with other methods contain this name, as null; a new method must leave it False."""

    def passes(self, options: Any) -> ExtraPasses:
        """Return the forward passes that the method needs besides those of training, for the planner.

        For a divergence, mismatched rows go through the reference once and through the model in each step. A teacher
        that is no server counts as a model of the same size.
        """
        if self.needs_rollouts:  # log-probabilities before the update, of the model and of the reference
            return ExtraPasses(before_training=0, each_step=1 + int(self.needs_reference(options)))
        num_divergences = int(self.needs_divergence(options))
        asked, on_policy = self.asks_teacher(options), self.on_policy(options)
        num_teachers = int(asked is not None and asked.server is None)
        share = on_policy.share if on_policy else 0
        return ExtraPasses(
            before_training=int(self.needs_reference(options)) + num_divergences + num_teachers * (share < 1),
            each_step=num_divergences + num_teachers * share,
        )
