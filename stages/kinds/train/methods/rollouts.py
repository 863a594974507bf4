"""What a recipe may say of completions that are sampled from the model while it is trained: how, and what judges them.

A method that learns from judged ones has these options among its own (`Method.needs_rollouts`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PositiveInt

from stages.core.fields import AddedLater
from stages.core.numbers import PositiveFp32
from stages.core.strict import StrictModel
from stages.rewards.registry import AnyReward, RewardName
from stages.serving.config import ServingConfig, StopTexts
from stages.serving.registry import chosen_engine, installed_version

if TYPE_CHECKING:
    from torch import Tensor


class SamplingServer(StrictModel):
    """A vLLM that others started, and whose weights become those of the training, round by round."""

    url: str = Field(pattern=r"^https?://[^\s/@]+(/\S*)?/v1/?$", description="Of the server, up to and with `/v1`.")
    served_model: str = Field(min_length=1, description="The model that is trained, as the server calls it.")
    key_variable: str | None = Field(
        None, pattern=r"^[A-Za-z_]\w*$", description="Environment variable with the server's key; default: no key."
    )


class SamplingOptions(StrictModel):
    """How the model that is trained answers prompts."""

    max_completion_length: PositiveInt = Field(512, description="Tokens after which a completion is cut off.")
    temperature: PositiveFp32 = Field(1.0, le=100, description="Of sampling, and of the probabilities that learn.")
    top_p: PositiveFp32 = Field(1.0, le=1, description="Only the likeliest tokens that have this share together.")
    stop: StopTexts = Field((), description="Texts that end a completion.")
    serving: ServingConfig = Field(
        ServingConfig(), description="Of the server that samples; `dtype: auto` is the precision of the training."
    )
    server: Annotated[SamplingServer | None, AddedLater()] = Field(
        None, description="One that runs already, in the place of one that the stage starts."
    )

    def dtype(self, precision: str) -> str:
        """In which the server computes, beside a training of this precision."""
        if self.serving.dtype != "auto":
            return self.serving.dtype
        return "float32" if precision == "fp32" else "bfloat16"

    @property
    def num_devices(self) -> int:
        """Of the stage, for the server."""
        return 0 if self.server else self.serving.tensor_parallel_size

    @property
    def engine_version(self) -> dict[str, str]:
        """`ENGINE_version` of the server that the stage starts. Raises ResourceError when it is not installed."""
        return {} if self.server else installed_version(chosen_engine(self.serving))


class RolloutOptions(SamplingOptions, ABC):
    """How prompts are answered, by whom, and what the answers are worth."""

    num_generations: int = Field(8, ge=2, le=1024, description="Completions of each prompt, a group.")
    steps_per_generation: PositiveInt = Field(
        1,
        description="Optimizer steps that share the completions of one sampling, each `global_batch_size` of them; "
        "TRL has as many as it accumulates gradients over.",
    )
    num_iterations: PositiveInt = Field(1, description="How often a batch of completions is learned from.")
    mask_truncated_completions: bool = Field(
        False, description="Whether completions that were cut off are learned from by nobody (DAPO)."
    )
    system: str | None = Field(None, min_length=1, description="System message of chats that have none.")
    apply_chat_template: bool | None = Field(
        None, description="Ask prompts of plain text as a user of a chat; default: as `kind: generate` does."
    )
    reference: str | None = Field(
        None,
        description="Column of the right answer; default: the row's own last answer, or `answer`, `solution`, "
        "`ground_truth`.",
    )
    rewards: dict[RewardName, AnyReward] = Field(
        default_factory=dict, description="Name, as metrics have it → what judges each completion; at least one."
    )
    max_draws: PositiveInt = Field(
        1,
        le=100,
        description="Groups whose completions are all worth the same teach nothing. They are replaced by those of "
        "other prompts, up to so many samplings in all (dynamic sampling); what is left then stays. 1: all stay.",
    )

    @abstractmethod
    def advantages(self, rewards: Tensor) -> Tensor:
        """By how much each completion is better than the others: [completions], of their rewards, whose groups
        follow each other."""
