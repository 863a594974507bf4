"""Reward by format: 1 where the completion consists of the given tags in their order and nothing else, else 0."""

import re
from typing import Annotated, Literal

from pydantic import Field

from stages.rewards.reward import Completion, CompletionReward


class FormatReward(CompletionReward):
    """Reward of 1 where the completion is just `<think>…</think><answer>…</answer>`, with the given tags, else 0."""

    type: Literal["format"]
    tags: tuple[Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")], ...] = Field(
        ("think", "answer"),
        min_length=1,
        description="Names of the tags in their order; each must occur once and hold some text.",
    )

    def score(self, completion: Completion) -> float:
        position, text = 0, completion.text
        for tag in self.tags:
            begun = re.compile(rf"\s*<{tag}>").match(text, position)
            ended = text.find(f"</{tag}>", begun.end()) if begun else -1
            if begun is None or ended < 0 or not text[begun.end() : ended].strip():
                return 0.0
            if f"<{tag}>" in text[begun.end() : ended]:
                return 0.0
            position = ended + len(f"</{tag}>")
        return float(not text[position:].strip())
