"""Config of the generate stage, which samples a model's answers to prompts to make training data."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from stages.core.contract import DatasetReference, Reported, StageConfig
from stages.core.fields import AddedLater, SplitName, StrictModel
from stages.data.files import Portion
from stages.rewards.registry import AnyReward, RewardName
from stages.rollouts.environments.environment import unfit_options
from stages.rollouts.environments.registry import AnyEnvironment
from stages.rollouts.options import PromptOptions, SamplingOptions
from stages.serving.config import StopTexts
from stages.serving.served_models import AskedModelConfig

Ranking = Literal["all", "best", "pairs"]


class PromptsConfig(StrictModel):
    """Prompts of a generate stage: the dataset's rows that a model is to answer."""

    dataset: DatasetReference | None = Field(
        None, description="Stage that makes the dataset; required unless the environment makes rows."
    )
    split: SplitName = Field(
        "train", description="Split of the dataset: files whose name or folder begins with this text."
    )
    limit: PositiveInt | None = Field(
        None, description="Number of rows to use as prompts, from the first on. Default: all."
    )
    reference: str | None = Field(
        None,
        description="Column with the right answer; default: the row's last answer, `answer`, `solution`, "
        "`ground_truth`.",
    )


class Above(StrictModel):
    """Threshold on the sum of rewards, above which completions are kept."""

    above: float = Field(allow_inf_nan=False, description="Keep completions whose sum of rewards is greater than this.")


class Solved(StrictModel):
    """Numbers of a prompt's completions that are right, between which the prompt itself is kept, for training by RL."""

    solved: tuple[NonNegativeInt, NonNegativeInt] = Field(
        description="Smallest and largest number of right completions of a prompt to keep: [1, 7] of 8 leaves out what "
        "the model never or always solves."
    )
    above: float = Field(0.0, allow_inf_nan=False, description="A sum of rewards above this counts as right.")


class GenerateConfig(AskedModelConfig):
    """Config of the generate stage: samples answers to prompts, and keeps those with good rewards as training rows."""

    STAGE_VERSION: ClassVar[int] = 1
    PRODUCTS = ("dataset",)
    REPORTED = Reported(counts_data=True)
    HAS_CHECK: ClassVar[bool] = True

    kind: Literal["generate"]
    prompts: PromptsConfig
    system: str | None = Field(None, min_length=1, description="System message for chat prompts that have none.")
    apply_chat_template: bool | None = Field(
        None,
        description="Send plain-text prompts as a user's chat message (true) or as they are. Default: as this project "
        "last trained the model; else true if it has a chat template.",
    )
    num_samples: PositiveInt = Field(1, le=1024, description="Number of completions to sample for each prompt.")
    temperature: float = Field(
        1.0, ge=0, le=100, description="Sampling temperature; 0 always takes the likeliest token."
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Top-p sampling: from the likeliest tokens whose probabilities sum to this; 1 samples from all.",
    )
    max_tokens: PositiveInt = Field(
        256, description="Largest number of tokens in a completion; longer ones are cut off and never kept."
    )
    stop: StopTexts = Field((), description="Texts at which a completion ends; they are not part of it.")
    seed: int = Field(0, ge=0, lt=2**63, description="Random seed, from which a seed for each completion is derived.")
    rewards: dict[RewardName, AnyReward] = Field(
        default_factory=dict, description="Rewards that score each completion, by the names that they get in metrics."
    )
    environment: Annotated[AnyEnvironment | None, AddedLater()] = Field(
        None,
        description="Environment in which the model acts over several turns; each turn has at most `max_tokens` "
        "tokens, and kept rows are whole episodes. Default: one answer to each prompt.",
    )
    keep: Ranking | Above | Solved = Field(
        "all",
        description="Completions to keep as training rows. all: all but cut-off, empty and repeated ones; best: each "
        "prompt's with the largest sum of rewards; {above: x}: all with a sum above x; pairs: best as "
        "chosen and worst as rejected; {solved: [m, n]}: the dataset's own rows whose prompts get m to n right "
        "completions, as prompts for GRPO.",
    )
    min_gap: PositiveFloat | None = Field(
        None,
        description="With `keep: pairs`: smallest reward difference of best and worst; default: any difference.",
    )

    @property
    def prompt_options(self) -> PromptOptions:
        prompts = self.prompts
        return PromptOptions(
            portion=Portion("training", prompts.split),
            limit=prompts.limit,
            reference=prompts.reference,
            reference_field="prompts.reference",
            system=self.system,
            apply_chat_template=self.apply_chat_template,
            rewards=self.rewards,
            environment=self.environment,
        )

    @property
    def sampling_options(self) -> SamplingOptions:
        return SamplingOptions(
            num_samples=self.num_samples,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=self.stop,
            seed=self.seed,
            concurrent_requests=self.execution.concurrent_requests,
        )

    def resolve_outside(self, limit_s: float | None = None) -> dict[str, JsonValue]:
        packages = self.environment.versions() if self.environment else {}
        return {**super().resolve_outside(limit_s), **packages}

    def prompt_folder(self, inputs: Mapping[str, Path]) -> Path | None:
        """Return the folder of the prompts' dataset, by stage name from `inputs`; None for an environment's rows."""
        return inputs[self.prompts.dataset] / "data" if self.prompts.dataset else None

    def custom_code(self) -> tuple[str, ...]:
        own = ((name, reward.custom_code()) for name, reward in self.rewards.items())
        found = [f"rewards.{name}: {code}" for name, code in own if code]
        if self.environment and (code := self.environment.custom_code()):
            found.append(f"environment: {code}")
        return (*super().custom_code(), *found)

    def problems_among(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        yield from super().problems_among(stages)
        for field, problem in self.environment.problems() if self.environment else ():
            yield f"environment.{field}: {problem}"
        if not self.serving_engine.capabilities.token_prompts:
            yield (
                f"model: completions are asked for by token ids, which {self.serving_engine.title} does not take for a "
                "prompt; serve the model with vllm"
            )
        longest = self.serving.max_model_len if self.serving else None
        if longest and self.max_tokens >= longest:
            yield (
                f"max_tokens: is {self.max_tokens}, which leaves no room for a prompt in serving.max_model_len, "
                f"{longest}; lower it, or raise that"
            )

    @model_validator(mode="after")
    def _keeps_by_rewards(self) -> Self:
        is_rewarded = self.rewards or (self.environment and self.environment.gives_rewards)
        if self.keep != "all" and not is_rewarded:
            raise ValueError(f"`keep: {self.keep}` needs `rewards` to choose by; name some, or say `keep: all`")
        if self.keep in ("best", "pairs") and self.num_samples == 1:
            raise ValueError(f"`keep: {self.keep}` chooses among several completions; raise `num_samples`, which is 1")
        if self.min_gap is not None and self.keep != "pairs":
            raise ValueError("`min_gap` is of `keep: pairs` alone; remove it")
        if isinstance(self.keep, Solved):
            least, most = self.keep.solved
            if not least <= most <= self.num_samples:
                raise ValueError(
                    f"`keep.solved: [{least}, {most}]` counts right ones among `num_samples: {self.num_samples}`; "
                    f"expected two rising numbers up to {self.num_samples}"
                )
        return self

    @model_validator(mode="after")
    def _has_prompts(self) -> Self:
        if not self.prompts.dataset and not (self.environment and self.environment.makes_rows):
            raise ValueError("`prompts.dataset` is missing; say `dataset: STAGE`, the stage that makes the prompts")
        return self

    @model_validator(mode="after")
    def _is_fit_for_episodes(self) -> Self:
        if self.environment:
            for option, why in unfit_options(self.stop, self.apply_chat_template, self.rewards):
                raise ValueError(f"`{option}` {why}")
        return self

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.temperature == 0 and self.num_samples > 1:
            raise ValueError(
                f"`temperature` is 0, so that {self.num_samples} completions of a prompt would all be the same; raise "
                "it, or say `num_samples: 1`"
            )
        return self
