"""What evaluations and promotions say of scores, in the same words: a refresh says it once, and of which stages."""

from __future__ import annotations


def zero_score_warning(name: str) -> str:
    """Of the score `TASK.METRIC`: most often, the model does not know the prompt."""
    return (
        f"{name} is 0: no answer was right; read some in the evaluation's samples/. Is the model asked as it was "
        "trained (apply_chat_template, the task's prompt), and does it end an answer where the task expects it?"
    )
