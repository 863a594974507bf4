"""What evaluations and promotions say of scores, in the same words: a refresh says it once, and of which stages."""

from __future__ import annotations

NUM_CUT = "num_answers_cut"
"""Metric of an evaluation: answers that ended at the most tokens that they may have, where some did."""


def zero_score_warning(name: str, evaluation: str, num_samples: int, num_cut: int) -> str:
    """Return what to look at when the score `TASK.METRIC` of a stage is 0: most often the model was asked otherwise
    than it was trained.

    num_cut: answers of the evaluation that ended at the most tokens that they may have.
    """
    cut = f" ({num_cut} answers reached max_gen_toks and were cut there)" if num_cut else ""
    return (
        f"{name} is 0: of {num_samples} answers none was right{cut}. Read them: `lifecycle show {evaluation} "
        "--samples`. Is the model asked as it was trained (apply_chat_template, the task's prompt), and does it end an "
        "answer where the task expects it?"
    )
