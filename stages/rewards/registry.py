"""Registry of rewards. To add a reward, write a module beside this file and add one line here."""

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field

from stages.rewards.code import CodeReward
from stages.rewards.exact_match import ExactMatchReward
from stages.rewards.format import FormatReward
from stages.rewards.json_schema import JsonSchemaReward
from stages.rewards.judge import JudgeReward
from stages.rewards.length import LengthReward
from stages.rewards.math import MathReward
from stages.rewards.number import NumberReward
from stages.rewards.python import PythonReward
from stages.rewards.regex import RegexReward
from stages.rewards.reward import Reward
from stages.rewards.reward_model import RewardModelReward

REWARDS: tuple[type[Reward], ...] = (
    ExactMatchReward,
    NumberReward,
    MathReward,
    RegexReward,
    FormatReward,
    LengthReward,
    JsonSchemaReward,
    CodeReward,
    RewardModelReward,
    JudgeReward,
    PythonReward,
)

if TYPE_CHECKING:  # the union depends on the registry, which no type checker runs
    AnyReward = Reward
else:
    AnyReward = Annotated[Union[REWARDS], Field(discriminator="type")]  # noqa: UP007

RewardName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]
"""Name of a reward as recipes and metrics use it: a letter, then letters, digits, `_` or `-`."""
