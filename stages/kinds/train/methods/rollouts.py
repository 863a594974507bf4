"""Options of sampling completions from the model in training, and of the rewards that judge them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from stages.core.contract import DatasetReference
from stages.core.fields import AddedLater, PositiveFp32, StrictModel
from stages.data.config import DataConfig
from stages.rewards.registry import AnyReward, RewardName
from stages.rollouts.environments.registry import AnyEnvironment
from stages.serving.config import ServingConfig, StopTexts
from stages.serving.registry import chosen_engine, installed_version

if TYPE_CHECKING:
    from torch import Tensor

    from stages.rewards.reward import Reward


NOT_LEARNED_FROM = ("placement", "data_parallel_size")
"""Sampling options that change devices and speed only, and so are left out of a stage's cache key."""


ServerUrl = Annotated[str, Field(pattern=r"^https?://[^\s/@]+(/\S*)?/v1/?$")]


class SamplingServer(StrictModel):
    """Config of vLLM servers that others started, which get the current weights before each round of sampling."""

    url: ServerUrl = Field(description="Address of the sampling server, including `/v1`.")
    other_urls: Annotated[tuple[ServerUrl, ...], AddedLater()] = Field(
        (),
        max_length=63,
        description="Addresses of more servers of the same model and key, among which prompts are divided.",
    )
    served_model: str = Field(min_length=1, description="Name of the trained model on the server.")
    key_variable: str | None = Field(
        None, pattern=r"^[A-Za-z_]\w*$", description="Environment variable with the server's API key; default: no key."
    )

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url, *self.other_urls)

    @model_validator(mode="after")
    def _each_server_once(self) -> Self:
        if twice := [url for url, count in Counter(url.rstrip("/") for url in self.urls).items() if count > 1]:
            raise ValueError(f"names {twice[0]} twice; expected each server once")
        return self


class SamplingOptions(StrictModel):
    """Options of sampling from the trained model: the server and the sampling parameters."""

    max_completion_length: PositiveInt = Field(
        512, description="Largest number of tokens of a completion, after which it is cut off."
    )
    temperature: PositiveFp32 = Field(
        1.0, le=100, description="Temperature of sampling; the loss computes its probabilities at the same temperature."
    )
    top_p: PositiveFp32 = Field(
        1.0, le=1, description="Top-p: sample from the likeliest tokens that together have this probability."
    )
    stop: StopTexts = Field((), description="Texts that end a completion.")
    serving: ServingConfig = Field(
        ServingConfig(), description="Options of the server that samples; `dtype: auto` takes the training's precision."
    )
    server: Annotated[SamplingServer | None, AddedLater()] = Field(
        None, description="Address of a sampling server that runs already, instead of one that the stage starts."
    )
    data_parallel_size: Annotated[PositiveInt | None, AddedLater()] = Field(
        None,
        description="Copies of the model among which the sampling server divides prompts, each on "
        "`serving.tensor_parallel_size` devices. Default: 1, or with `placement: colocated` as many as the training's "
        "devices take. Not in the cache key.",
    )

    def dtype(self, precision: str) -> str:
        """Return the dtype in which the sampling server computes, given the precision of the training."""
        if self.serving.dtype != "auto":
            return self.serving.dtype
        return "float32" if precision == "fp32" else "bfloat16"

    @property
    def is_colocated(self) -> bool:
        """True if the sampling server uses the training's devices, and sleeps while it learns."""
        return False

    @property
    def num_devices(self) -> int:
        """Number of devices of the sampling server, besides those that train."""
        if self.server or self.is_colocated:
            return 0
        return self.serving.tensor_parallel_size * self.copies(0)

    def copies(self, num_training: int) -> int:
        """Return the server's number of model copies. num_training: devices of the node that train."""
        most = num_training // self.serving.tensor_parallel_size if self.is_colocated else 1
        return self.data_parallel_size or max(1, most)

    @property
    def engine_version(self) -> dict[str, str]:
        """Version of the sampling server's engine, as `ENGINE_version`, or {}; ResourceError if not installed."""
        return {} if self.server else installed_version(chosen_engine(self.serving))


class AsynchronousOptions(StrictModel):
    """Overlap of sampling with training."""

    lag: NonNegativeInt = Field(
        0,
        le=16,
        description="Number of rounds by which the weights that sample are older than those that learn from the "
        "round: it is sampled while the rounds before are learned. 0: sampling and training take turns.",
    )


class EnvironmentPart(StrictModel):
    """One environment of several: its share, the rows of its episodes, and the rewards that judge them."""

    environment: AnyEnvironment = Field(description="Environment of these episodes, by one of its fields.")
    weight: PositiveFp32 = Field(
        1.0, description="Share of this environment's prompts in each round, relative to the other weights."
    )
    dataset: DatasetReference | None = Field(
        None,
        description="Stage that makes this environment's prompts. Default: rows that it makes itself, else those of "
        "`data.dataset`.",
    )
    rewards: tuple[RewardName, ...] | None = Field(
        None, description="Names of the `rewards` that judge this environment's episodes. Default: all."
    )

    def data_from(self, data: DataConfig) -> DataConfig:
        """Return the options of this environment's prompts; without a dataset, it makes them itself."""
        shared = None if self.environment.makes_rows else data.dataset
        return data.model_copy(update={"dataset": self.dataset or shared})


@dataclass(frozen=True)
class Acting:
    """Sampling of one environment's completions. field: of the environment in a recipe. options: with it alone."""

    field: str
    options: RolloutOptions
    data: DataConfig
    weight: float = 1.0


class RolloutOptions(SamplingOptions, ABC):
    """Options of sampling completions and judging them by rewards: server, sampling parameters, groups and rewards."""

    num_generations: int = Field(
        8,
        ge=2,
        le=1024,
        description="Completions sampled for each prompt; they form a group, whose rewards are compared.",
    )
    steps_per_generation: PositiveInt = Field(
        1,
        description="Optimizer steps that learn from one sampling, `global_batch_size` completions each (TRL: its "
        "accumulation steps).",
    )
    num_iterations: PositiveInt = Field(1, description="Number of passes over the completions of one sampling.")
    mask_truncated_completions: bool = Field(
        False, description="Leave completions that were cut off out of the loss (DAPO)."
    )
    system: str | None = Field(None, min_length=1, description="System message that is added to chats without one.")
    apply_chat_template: bool | None = Field(
        None,
        description="Send plain-text prompts as a user's chat message (true) or as they are. Default: as this project "
        "last trained the model; else true if it has a chat template.",
    )
    reference: str | None = Field(
        None,
        description="Dataset column with the right answer; default: the row's last answer, or `answer`, `solution`, "
        "`ground_truth`.",
    )
    rewards: dict[RewardName, AnyReward] = Field(
        default_factory=dict,
        description="Rewards that judge each completion, by the name that they have in metrics; at least one.",
    )
    max_draws: PositiveInt = Field(
        1,
        le=100,
        description="Largest number of samplings in a round (dynamic sampling), 1: one. Groups of equal rewards give "
        "no gradient and are replaced by other prompts' groups; after the last sampling they stay.",
    )

    environment: Annotated[AnyEnvironment | None, AddedLater()] = Field(
        None,
        description="Environment in which the model acts over several turns, such as tools that it calls; each turn "
        "has at most `max_completion_length` tokens. Default: one answer to each prompt.",
    )
    environments: Annotated[dict[RewardName, EnvironmentPart], AddedLater()] = Field(
        {},
        description="Several environments in one run, by the names that they have in metrics, set instead of "
        "`environment`. Each has its share of a round's prompts.",
    )
    placement: Annotated[Literal["separate", "colocated"], AddedLater()] = Field(
        "separate",
        description="Devices of the sampling server. separate: its own. colocated: those that train; it sleeps during "
        "updates, so one GPU suffices. Not in the cache key.",
    )

    replay_experts: Annotated[bool, AddedLater()] = Field(
        False,
        description="Send each token to the experts that the old policy's routers chose for it, in all steps of a "
        "round, so that π/π_old does not jump where a router chooses differently. Mixtures of experts only.",
    )
    asynchronous: Annotated[AsynchronousOptions, AddedLater()] = Field(
        AsynchronousOptions(), description="Sampling of later rounds while the model learns from earlier ones."
    )

    @property
    def is_colocated(self) -> bool:
        return self.placement == "colocated"

    @property
    def acts(self) -> bool:
        """Return whether completions are episodes in an environment."""
        return bool(self.environment or self.environments)

    def parts(self, data: DataConfig) -> dict[str, Acting]:
        """Return the sampling in each of several environments, by name; in a single one or in none, by "".

        In the order of the names, as a recipe's version does not know in which order it lists them.
        """
        if not self.environments:
            return {"": Acting("environment", self, data)}
        return {
            name: Acting(
                f"environments.{name}.environment",
                self.model_copy(
                    update={"environment": part.environment, "environments": {}, "rewards": self._rewards_of(part)}
                ),
                part.data_from(data),
                part.weight,
            )
            for name, part in sorted(self.environments.items())
        }

    def _rewards_of(self, part: EnvironmentPart) -> dict[str, Reward]:
        chosen = self.rewards if part.rewards is None else part.rewards
        return {name: reward for name, reward in self.rewards.items() if name in chosen}

    @model_validator(mode="after")
    def _environments_go_together(self) -> Self:
        if self.environment and self.environments:
            raise ValueError("has `environment` and `environments`; put it among them, or remove them")
        for name, part in self.environments.items():
            if unknown := [reward for reward in part.rewards or () if reward not in self.rewards]:
                raise ValueError(
                    f"`environments.{name}.rewards` names {unknown[0]}, which is not among `rewards`; expected some of "
                    f"{', '.join(self.rewards) or 'them, and there are none'}"
                )
        judging = {name for part in self.environments.values() for name in self._rewards_of(part)}
        if self.environments and (idle := [name for name in self.rewards if name not in judging]):
            raise ValueError(f"`rewards.{idle[0]}` judges no environment; name it in one's `rewards`, or remove it")
        return self

    @abstractmethod
    def advantages(self, rewards: Tensor) -> Tensor:
        """Return how much better each completion is than the others; both float [completions], groups in a row."""
