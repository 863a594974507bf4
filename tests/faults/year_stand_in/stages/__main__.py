"""Stand-in for train and evaluate stages in the simulated year of nightly refreshes; each takes milliseconds.

python -m stages WORK_FOLDER, with PYTHONPATH here
"""

import hashlib
import json
import shutil
import struct
import sys
from pathlib import Path

NUM_DOCUMENTS = 100
GOOD, BAD = 90, 40
"""Numbers of right answers, of 100, that a good and a bad model give."""
NUM_VALUES = 8


def train(work: Path, inputs: dict[str, Path]) -> None:
    """Stand in for training: write the base model with its last weights replaced by a hash of the training rows."""
    rows = b"".join(path.read_bytes() for path in sorted((inputs["rows"] / "data").glob("*.jsonl")))
    shutil.copytree(inputs["base"] / "model", work / "model")
    weights = work / "model" / "model.safetensors"
    weights.write_bytes(trained(weights.read_bytes(), rows))
    (work / "model" / "right.json").write_text(str(right_answers(rows)))


def trained(weights: bytes, rows: bytes) -> bytes:
    """Return a stand-in model's weights, which tests can predict: they depend on base model and training rows only."""
    values = [byte / 256 for byte in hashlib.sha256(rows).digest()[:NUM_VALUES]]
    return weights[: -4 * NUM_VALUES] + struct.pack(f"<{NUM_VALUES}f", *values)


def right_answers(rows: bytes) -> int:
    """Return how many answers of a stand-in model are right: few if it has a multiple of 3 training rows, else many."""
    return BAD if rows.count(b"\n") % 3 == 0 else GOOD


def evaluate(work: Path, inputs: dict[str, Path]) -> None:
    """Stand in for evaluation: write scores for the task `addition` in the files that an evaluate stage writes."""
    right = int((inputs["sft"] / "model" / "right.json").read_text())
    rows = [
        {
            "doc_id": number,
            "filter": "none",
            "doc_hash": f"document {number}",
            "target_hash": f"target {number}",
            "prompt_hash": f"prompt {number}",
            "exact_match": float(number < right),
        }
        for number in range(NUM_DOCUMENTS)
    ]
    mean = right / NUM_DOCUMENTS
    scores = {
        "results": {"addition": {"alias": "addition", "exact_match,none": mean, "exact_match_stderr,none": 0.1}},
        "configs": {"addition": {"generation_kwargs": {"until": ["\n"]}}},
        "versions": {"addition": 1.0},
        "n-shot": {"addition": 0},
        "higher_is_better": {"addition": {"exact_match": True}},
    }
    (work / "samples").mkdir(parents=True)
    (work / "scores.json").write_text(json.dumps(scores))
    (work / "samples" / "addition.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (work / "result.json").write_text(json.dumps({"metrics": {"addition.exact_match": mean}}))


def main() -> None:
    work = Path(sys.argv[1])
    stage_input = json.loads((work / "config.json").read_text())
    inputs = {name: Path(folder) for name, folder in stage_input["inputs"].items()}
    if stage_input["kind"] == "check":
        (work / "findings.json").write_text("{}")
        (work / "result.json").write_text("{}")
    elif stage_input["kind"] == "train":
        train(work, inputs)
        (work / "result.json").write_text("{}")
    else:
        evaluate(work, inputs)


if __name__ == "__main__":
    main()
