"""What a training method is: what the recipe may say of it, its loss, and what it needs of everybody else.

Data preparation, engines, planner and loop ask a method for its needs; none of them asks which method it is. A method
is a module beside this one and a line in `registry.py`. These modules are light: the recipe is read without torch, so
losses import it where they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import Field

from stages.core.strict import StrictModel
from stages.data.config import RowKind
from stages.kinds.train.methods.rollouts import SamplingOptions
from stages.planner.workload import Passes

if TYPE_CHECKING:
    from stages.data.batch import Batch
    from stages.engines.loss import Loss

BatchChange = Callable[["Batch"], "Batch"]
"""What a method makes of a batch before anybody sees it; its `repr` says all that decides what it does."""


class TeacherServer(StrictModel):
    """A server with vLLM's API that gives `loss_top_k` log-probabilities in the place of each token of a prompt."""

    url: str = Field(pattern=r"^https?://[^\s/@]+(/\S*)?/v1/?$", description="Of the server, up to and with `/v1`.")
    served_model: str = Field(
        min_length=1,
        description="Which, as the server calls it. What it said is kept under this name: serve other weights by "
        "another one.",
    )
    key_variable: str | None = Field(
        None, pattern=r"^[A-Za-z_]\w*$", description="Environment variable with the server's key; default: no key."
    )


@dataclass(frozen=True)
class TeacherTokens:
    """What batches carry of a teacher, in the place of every target: its likeliest tokens, with log-probabilities."""

    number: int
    temperature: float
    """What logits are divided by before probabilities are taken of them, the teacher's and the model's."""
    server: TeacherServer | None = None
    """Who is asked, in the place of a stage's model."""


@dataclass(frozen=True)
class OnPolicySteps:
    """Steps that learn from what the model itself answers to the prompts of their rows, in the place of the rows."""

    share: float
    """Of all steps, on average."""
    sampling: SamplingOptions


@dataclass(frozen=True)
class Method:
    """A way to learn from rows. Functions take the options in the recipe, or None where the method has none."""

    name: str
    """What `method:` of a recipe says, and the field that holds `options`."""
    rows: RowKind
    """What it learns from."""
    build_loss: Callable[[Any], Loss]
    options: type[StrictModel] | None = None
    """What a recipe may say of it; everything has a default."""
    needs_reference: Callable[[Any], bool] = lambda _: False
    """Whether batches carry the log-probabilities that the model gave to their documents before training."""
    batch_change: Callable[[Any], BatchChange | None] = lambda _: None
    """Which targets count, and how much, if that is not as data preparation has it."""
    needs_divergence: Callable[[Any], bool] = lambda _: False
    """Whether batches say how far the model is from the reference (see `divergence.py`)."""
    asks_teacher: Callable[[Any], TeacherTokens | None] = lambda _: None
    """What a teacher says of every target, if there is one: the stage that `teacher:` of the recipe names, or a
    server."""
    on_policy: Callable[[Any], OnPolicySteps | None] = lambda _: None
    """Which steps learn from unjudged answers of the model, about which the teacher is asked as they come."""
    needs_rollouts: bool = False
    """Whether it learns from judged answers of the model alone; its options are `RolloutOptions` then."""
    needs_score_head: bool = False
    """Whether the model gives one number a document, in the place of probabilities of tokens: a reward model."""
    reads_margins: bool = False
    """Whether it makes use of the `margin` that rows of pairs may have."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """What its loss measures beside itself: name → meaning."""
    averaged_over: str = "target tokens"
    """What its loss is the mean over."""
    is_likelihood: bool = False
    """Whether its loss is how unlikely the target tokens are, in nats a token."""
    headline: tuple[str, ...] = ()
    """Those of `metrics` that a person is shown first."""
    is_null_in_identity: bool = False
    """Whether the identity of other methods' stages holds `NAME: null`. A method to come must leave this False: what is
    not there changes no version."""

    def passes(self, options: Any) -> Passes:
        """What its needs cost in forward passes, for the planner: a new need adds its own here. Of a divergence,
        mismatched rows go through the reference before training and through the model in each step. A teacher that is
        no server counts as one that is as large as the model."""
        if self.needs_rollouts:  # what the completions had when they were sampled, by the model and by the reference
            return Passes(before_training=0, each_step=1 + int(self.needs_reference(options)))
        num_divergences = int(self.needs_divergence(options))
        asked, on_policy = self.asks_teacher(options), self.on_policy(options)
        num_teachers = int(asked is not None and asked.server is None)
        share = on_policy.share if on_policy else 0
        return Passes(
            before_training=int(self.needs_reference(options)) + num_divergences + num_teachers * (share < 1),
            each_step=num_divergences + num_teachers * share,
        )
