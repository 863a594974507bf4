"""Episode of two turns as a row of the table of episodes, for tests of what reads it."""

from typing import Any

from stages.rollouts.episode_table import EpisodeRow, StoredSegment


def episode(**changed: Any) -> EpisodeRow:
    """Return the row of an episode that called a tool once; `changed` replaces fields."""
    fields: dict[str, Any] = {
        "row": "rows.jsonl:3",
        "prompt": "What is 2 + 2?",
        "reference": "4",
        "step": None,
        "sample": 1,
        "seed": 5,
        "text": "4",
        "transcript": "called, and said 4",
        "end": "done",
        "num_tokens": 2,
        "total": 0.5,
        "prompt_ids": [5, 6],
        "segments": [
            StoredSegment(author="model", token_ids=[7], log_probabilities=[-0.5]),
            StoredSegment(author="environment", token_ids=[8, 9], log_probabilities=[]),
            StoredSegment(author="model", token_ids=[4], log_probabilities=[-0.25]),
        ],
        "rewards": {"right": 1.0},
        "metrics": {"turns": 2.0, "calls": 1.0},
    }
    return EpisodeRow(**{**fields, **changed})
