"""Description of a training method: its options, its loss, and its needs of data preparation, engine, planner and loop.

These ask a method for its needs; none of them asks which method it is. A method is a module beside this one and a line
in `registry.py`. These modules are light: the recipe is read without torch, so losses import it where they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import Field

from stages.core.fields import StrictModel
from stages.data.config import RowKind
from stages.kinds.train.methods.rollouts import SamplingOptions
from stages.planner.workload import Passes

if TYPE_CHECKING:
    from stages.data.batch import Batch
    from stages.engines.loss import Loss

BatchChange = Callable[["Batch"], "Batch"]
"""A method's change of each batch; its `repr` must say everything that decides the result, since it keys a cache."""


class TeacherServer(StrictModel):
    """Server with vLLM's API that returns the `loss_top_k` likeliest tokens at each position of a prompt."""

    url: str = Field(pattern=r"^https?://[^\s/@]+(/\S*)?/v1/?$", description="Server's address, including `/v1`.")
    served_model: str = Field(
        min_length=1,
        description="Model's name on the server. The teacher's answers are cached under this name: serve other weights "
        "under another one.",
    )
    key_variable: str | None = Field(
        None, pattern=r"^[A-Za-z_]\w*$", description="Environment variable with the server's API key; default: no key."
    )


@dataclass(frozen=True)
class TeacherTokens:
    """Need of a teacher's likeliest tokens, with log-probabilities, at every target."""

    number: int
    """Number of the teacher's likeliest tokens at each target."""
    temperature: float
    """Divisor of the teacher's and the model's logits in the loss."""
    server: TeacherServer | None = None
    """Address of the teacher's server; None: the teacher is a stage's model."""


@dataclass(frozen=True)
class OnPolicySteps:
    """Steps that learn from the model's own answers to their rows' prompts instead of the rows."""

    share: float
    """Average share of steps that learn from the model's own answers."""
    sampling: SamplingOptions


@dataclass(frozen=True)
class Method:
    """A training method. Functions get the method's options from the recipe, or None where it has none."""

    name: str
    """Name of the method in `method:` of a recipe, and the field that holds its `options`."""
    rows: RowKind
    """Kind of rows that the training method learns from."""
    build_loss: Callable[[Any], Loss]
    options: type[StrictModel] | None = None
    """Config class of the method's options, all of which have defaults; None: no options."""
    needs_reference: Callable[[Any], bool] = lambda _: False
    """True if batches carry the log-probabilities of their documents before training."""
    batch_change: Callable[[Any], BatchChange | None] = lambda _: None
    """Change that the method makes to targets or their weights, if data preparation's are not right."""
    needs_divergence: Callable[[Any], bool] = lambda _: False
    """True if batches carry the divergence from the reference (`loop.with_divergence`)."""
    asks_teacher: Callable[[Any], TeacherTokens | None] = lambda _: None
    """Need of a teacher's tokens at every target; the teacher is `teacher:` of the recipe, or a server."""
    on_policy: Callable[[Any], OnPolicySteps | None] = lambda _: None
    """Steps that learn from the model's own answers, which the teacher scores but no reward judges."""
    needs_rollouts: bool = False
    """True if the method learns only from the model's own judged answers; `options` are `RolloutOptions`."""
    needs_score_head: bool = False
    """True if the model gives one number a document instead of probabilities of tokens: a reward model."""
    reads_margins: bool = False
    """True if the method uses the `margin` that rows of pairs may have."""
    metrics: Mapping[str, str] = field(default_factory=dict)
    """Metrics of the method's loss: name → meaning."""
    averaged_over: str = "target tokens"
    """Things that a method's loss is a mean over, such as pairs or tokens."""
    is_likelihood: bool = False
    """True if the loss is the negative log-likelihood of the target tokens, in nats a token."""
    usual_learning_rates: tuple[tuple[float, float], ...] = ()
    """Usual peak learning rates of AdamW over all weights, by model size: (largest size in billions, learning rate).

    `lifecycle init` proposes the method that has them for its kind of rows.
    """
    headline: tuple[str, ...] = ()
    """Names of the method's metrics that are shown first."""
    is_null_in_identity: bool = False
    """True if other methods' stages have `NAME: null` in their identity, for this method's options.

    A new method must leave this False, so that the versions of existing stages stay as they are.
    """

    def passes(self, options: Any) -> Passes:
        """Return the forward passes that a method's needs cost, for the planner; a new need adds its own here.

        For a divergence, mismatched rows go through the reference before training and through the model in each step. A
        teacher that is no server counts as a model of the same size.
        """
        if self.needs_rollouts:  # log-probabilities before the update, of the model and of the reference
            return Passes(before_training=0, each_step=1 + int(self.needs_reference(options)))
        num_divergences = int(self.needs_divergence(options))
        asked, on_policy = self.asks_teacher(options), self.on_policy(options)
        num_teachers = int(asked is not None and asked.server is None)
        share = on_policy.share if on_policy else 0
        return Passes(
            before_training=int(self.needs_reference(options)) + num_divergences + num_teachers * (share < 1),
            each_step=num_divergences + num_teachers * share,
        )
