"""Protocol of environments, in which a model acts over several turns, and the fields that their configs share.

A new environment is a module here and a line in `registry.py`.
"""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, Field, JsonValue, PositiveInt

from stages.core.errors import LifecycleError
from stages.core.fields import Seconds, StrictModel
from stages.data.messages import Conversation, Message, Tool, make_message

ENVIRONMENT = "environment"
"""Name of the reward that an environment gives itself."""


@dataclass(frozen=True)
class Call:
    """Call of a tool that a model wrote."""

    name: str
    arguments: Any


@dataclass(frozen=True)
class Action:
    """Turn of the model, as an environment sees it.

    text: without the end token. calls: those that were read from it. malformed: the reason why what looks like a call
    could not be read; None where all could. before: text before the first call. num_tokens: of all that was read
    before the turn, and of the turn.
    """

    text: str
    calls: tuple[Call, ...] = ()
    malformed: str | None = None
    before: str = ""
    num_tokens: tuple[int, int] = (0, 0)

    @property
    def message(self) -> Message:
        """Message of the turn, as a dataset's row has it; text before the first call is its content."""
        if not self.calls:
            return make_message("assistant", self.text)
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in self.calls
        ]
        return {**make_message("assistant", self.before.strip()), "tool_calls": calls}


@dataclass(frozen=True)
class Step:
    """Outcome of an action: messages that the model reads next (none at the end), reward, and whether this is the end.

    messages: of the role `tool`, or `user`. num_failed: calls that gave an error to read instead of a result.
    failure: how the environment itself failed, as a clause; that ends the episode, and no reward is known.
    """

    messages: tuple[Message, ...]
    reward: float = 0.0
    done: bool = False
    num_failed: int = 0
    failure: str | None = None


class Environment(Protocol):
    """World of one episode (protocol), which one thread uses."""

    def reset(self, row: Mapping[str, Any], seed: int) -> str | Conversation | None:
        """Begin an episode for a dataset row; return a message of the user that is added to the row's prompt, or None.

        An environment with prompts of its own returns a conversation, which takes the place of the row's.
        Raises DataError for a row that it cannot begin with.
        """

    def step(self, action: Action) -> Step:
        """Let the model act. Raises DataError when the environment itself fails."""

    def cut_short(self, last: Action | None) -> float:
        """Learn that the episode ended at a bound; return the reward for what was done until then.

        last: the model's last turn, where the bound cut it off.
        """
        return 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers of the episode beside those that every environment has, of equal names in all episodes."""
        return {}

    def close(self) -> None:
        """Free what the episode holds, once it is over."""


@dataclass(frozen=True)
class SeedRange:
    """Seeds of the rows that a task makes: `size` of them, from `seed` on."""

    task: str
    seed: int
    size: int

    def __str__(self) -> str:
        return f"{self.task} {self.seed} to {self.seed + self.size - 1}"

    def shares(self, other: "SeedRange") -> bool:
        """Return whether some seed of the same task is in both ranges."""
        begin, end = max(self.seed, other.seed), min(self.seed + self.size, other.seed + other.size)
        return self.task == other.task and begin < end


MakeEnvironment = Callable[[], Environment]


class EnvironmentConfig(StrictModel, ABC):
    """Base class of the configs of environments: bounds of an episode, and what rewards see of it."""

    IS_EXACT: ClassVar[bool] = False
    """True if its messages stay as they are: an episode ends with some that the chat template refuses."""

    max_turns: PositiveInt = Field(
        4, le=1000, description="Largest number of turns of the model in an episode; calls in the last have no answer."
    )
    max_episode_s: Seconds = Field(
        600.0, description="Time limit of an episode, in seconds, after which the model gets no further turn."
    )
    max_answer_bytes: PositiveInt = Field(
        4096, description="Largest number of bytes of the environment's answer to a turn; the rest is cut off."
    )
    rewards_see: Literal["last_answer", "transcript"] = Field(
        "last_answer",
        description="Text that rewards judge: the model's last turn, or all turns with the environment's answers.",
    )

    @property
    def makes_rows(self) -> bool:
        """Return whether the environment makes its own rows, so that no dataset is needed."""
        return False

    @property
    def gives_rewards(self) -> bool:
        """Return whether the environment itself rewards what the model does."""
        return False

    @property
    def writes(self) -> tuple[Literal["tool", "user"], ...]:
        """Roles of the messages that this environment answers with."""
        return ("tool",)

    @property
    def num_threads(self) -> int:
        """Number of threads that let environments act; one where they share what only one thread may use."""
        return 1

    @property
    def most_together(self) -> int | None:
        """Largest number of episodes that are played at a time; None without a limit."""
        return None

    @property
    def definitions(self) -> tuple[Tool, ...]:
        """Definitions of the tools that the model may call, which are part of its prompt."""
        return ()

    @property
    def seed_ranges(self) -> tuple[SeedRange, ...]:
        """Seeds of the rows that the environment makes."""
        return ()

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows that the environment makes. Raises DataError; none of one that makes no rows."""
        return iter(())

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise RowError for a dataset row with which no episode can begin."""
        return

    def versions(self) -> dict[str, JsonValue]:
        """Return the versions of packages that decide what happens, for the cache key; ResourceError without one."""
        return {}

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield the fields that the environment's package refuses, with the reason; ResourceError without one."""
        return iter(())

    @abstractmethod
    def opened(self, folder: Path) -> AbstractContextManager[MakeEnvironment]:
        """Open what the episodes share, and yield the function that makes an episode's environment.

        folder: of the stage, for temporary files. Raises a LifecycleError for something missing.
        """

    def opening_problems(self) -> Iterator[LifecycleError]:
        """Open the environment once; yield the error of one that cannot work, such as with a missing folder."""
        try:
            with tempfile.TemporaryDirectory() as folder, self.opened(Path(folder)):
                pass
        except LifecycleError as error:
            yield error

    def warnings(self) -> Iterator[str]:
        """Yield what people should know of this machine before the environment runs on it."""
        return iter(())

    def custom_code(self) -> str | None:
        """Return the name of the recipe's code that the environment runs; None without code."""
        return None


def unfit_options(
    stop: Sequence[str], apply_chat_template: bool | None, rewards: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """Yield the options that no episode can have, as recipes name them, each with what to do. rewards: their names."""
    if stop:
        yield "stop", "would end a turn where nothing can follow it in an episode; remove it"
    if apply_chat_template is False:
        yield "apply_chat_template: false", "leaves no turns, which episodes in an environment need; remove it"
    if ENVIRONMENT in rewards:
        yield f"rewards.{ENVIRONMENT}", "has the name of the environment's own reward; choose another"


def tool_message(content: str) -> Message:
    """Return a message with the answer of a tool."""
    return make_message("tool", content)


def shared_seeds(config: BaseModel, others: Mapping[str, BaseModel]) -> Iterator[str]:
    """Yield the seeds of a config's environments that those of others have as well, with what to do."""
    for mine in _seed_ranges(config):
        for name, other in others.items():
            if theirs := next(filter(mine.shares, _seed_ranges(other)), None):
                yield (
                    f"seed: {mine} are rows of {name} as well, which has {theirs}, so that what is learned would be "
                    f"asked; say `seed: {theirs.seed + theirs.size}`"
                )


def _seed_ranges(config: BaseModel) -> Iterator[SeedRange]:
    """Yield the seeds of the environments in a config, at any depth."""
    if isinstance(config, EnvironmentConfig):
        yield from config.seed_ranges
    for value in vars(config).values():
        for inner in value.values() if isinstance(value, dict) else (value,):
            if isinstance(inner, BaseModel):
                yield from _seed_ranges(inner)
