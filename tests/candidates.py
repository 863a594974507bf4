"""Made-up artifacts of a candidate for promotion, for tests: a model, an adapter and an evaluation.

The module is light to import, since stand-ins for stage processes use it.
"""

import json
from collections.abc import Sequence
from pathlib import Path

SCORE = "sums.exact_match"


def write_evaluation(folder: Path, answers: Sequence[float], *, prompt: str = "plain", version: float = 1.0) -> None:
    """Write an evaluation's made-up result files for the task `sums`; answers are right (1) or wrong (0)."""
    rows = [
        {
            "doc_id": number,
            "filter": "none",
            "doc_hash": f"document {number}",
            "target_hash": f"target {number}",
            "prompt_hash": f"{prompt} prompt {number}",
            "exact_match": answer,
        }
        for number, answer in enumerate(answers)
    ]
    mean = sum(answers) / len(answers)
    scores = {
        "results": {"sums": {"alias": "sums", "exact_match,none": mean, "exact_match_stderr,none": 0.1}},
        "configs": {"sums": {"generation_kwargs": {"until": ["\n"]}}},
        "versions": {"sums": version},
        "n-shot": {"sums": 0},
        "higher_is_better": {"sums": {"exact_match": True}},
    }
    (folder / "samples").mkdir(parents=True)
    (folder / "scores.json").write_text(json.dumps(scores))
    (folder / "samples" / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "result.json").write_text(json.dumps({"metrics": {SCORE: mean}}))


def write_model(folder: Path, content: str) -> None:
    """Write a model artifact; its weights file is `content` padded to 1 MiB."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "model.safetensors").write_bytes(content.encode().ljust(2**20))
    (folder / "result.json").write_text(json.dumps({"metrics": {"kl_nats_per_token": 0.02}}))


def write_adapter(folder: Path, content: str) -> None:
    """Write an adapter artifact; its weights file is `content` padded to 1 KiB."""
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(content.encode().ljust(2**10))
    (folder / "result.json").write_text("{}")
