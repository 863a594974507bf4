"""Options of making prompts from a dataset's rows, and of sampling completions; without an import of torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from stages.data.files import Portion
from stages.rewards.reward import Reward
from stages.rollouts.environments.environment import EnvironmentConfig


@dataclass(frozen=True)
class PromptOptions:
    """Options of making prompts from a dataset's rows.

    None: taken from the row or the model's folder. portion: rows of a split. limit: their number, from the first on.
    reference: column of the right answer. reference_field: the recipe's field that names this column, for messages.
    system: message for chats that have none. rewards: by name; some need the right answer. columns: name in the rows →
    name that formats have. environment: in which the prompts are the beginnings of episodes.
    """

    portion: Portion
    limit: int | None
    reference: str | None
    reference_field: str
    system: str | None
    apply_chat_template: bool | None
    rewards: Mapping[str, Reward]
    chat_template: Path | None = None
    template_date: date | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    environment: EnvironmentConfig | None = None


@dataclass(frozen=True)
class SamplingOptions:
    """Options of sampling completions of prompts. max_tokens: of each. seed: from which each gets its own."""

    num_samples: int
    max_tokens: int
    temperature: float
    top_p: float
    stop: tuple[str, ...]
    seed: int
    concurrent_requests: int
