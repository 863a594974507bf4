"""GRPO in an environment of OpenEnv's own server, while a real vLLM samples turns from the newest weights."""

import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from transformers import AutoTokenizer

from stages.core.process_tree import marked_processes
from stages.rollouts.episode_table import round_files
from tests.openenv_stand_in import THEIRS, their_server
from tests.pipeline.test_agent_program import make_ending_model
from tests.serving import served_processes
from tests.train_stage import logged, make_config, make_context, run_to_end

DIGITS = "0123456789"
NUM_STEPS, NUM_PROMPTS, NUM_GENERATIONS = 2, 4, 4


@pytest.mark.nightly
def test_episodes_of_openenv_s_server_are_learned_and_one_in_which_it_dies_is_not(tmp_path: Path) -> None:
    """`make test` covers the protocol, and servers that fail, with a stand-in: `test_openenv.py` of the unit tests."""
    artifacts = {name: tmp_path / name for name in ("base", "games")}
    make_ending_model(artifacts["base"] / "model")
    (artifacts["games"] / "data").mkdir(parents=True)
    rows: list[dict[str, Any]] = [
        {"prompt": f"Game {number}.", "reset": {"letters": DIGITS}} for number in range(NUM_STEPS * NUM_PROMPTS)
    ]
    rows[3]["reset"]["dies"] = str(tmp_path / "died")
    (artifacts["games"] / "data" / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with their_server(1) as url:
        options = {
            "num_generations": NUM_GENERATIONS,
            "max_completion_length": 16,
            "serving": {"enforce_eager": True, "kv_cache_memory_gib": 0.0625},
            "environment": {"openenv": url, "action": "guess", "observation": "text"},
        }
        texts = {"dataset": "games", "sequence_length": 128}
        size = NUM_PROMPTS * NUM_GENERATIONS
        config = make_config("grpo", steps=NUM_STEPS, global_batch_size=size, data=texts, grpo=options)
        work = make_context(tmp_path / "work", artifacts, config).work
        run_to_end(work, config)
    steps, files = logged(work), round_files(work)
    assert [row["step"] for row in steps] == [1, 2] == list(files)
    assert max(row["mismatch_mean"] for row in steps) < 1e-4, "the trainer learns the tokens that were sampled"
    tokenizer, ends = AutoTokenizer.from_pretrained(artifacts["base"] / "model"), set()
    for row, file in zip(steps, files.values(), strict=True):
        episodes = parquet.read_table(file).to_pylist()
        assert len(episodes) == size
        for one in episodes:
            said = [segment["token_ids"] for segment in one["segments"] if segment["author"] == "model"]
            assert one["prompt"].count("Guess a digit.") == 1 and one["turns"] == len(said)
            if one["end"] == "done":
                digits = sum(letter in DIGITS for turn in said for letter in tokenizer.decode(turn))
                assert len(said) == 2 and one["reward_environment"] == pytest.approx(digits / 10)
            elif one["end"] == "failed":
                assert one["reward_environment"] is None and one["row"].endswith(":4") and one["sample"] == 0
        known = [one["reward_environment"] for one in episodes if one["end"] != "failed"]
        assert row["reward_environment"] == row["reward"] == pytest.approx(sum(known) / len(known))
        assert len({*known}) > 1
        assert row["episode_environment_failed"] == 1 - len(known) / size
        ends |= {one["end"] for one in episodes}
    assert (tmp_path / "died").exists() and {"done", "failed"} <= ends <= {"done", "failed", "tokens"}
    assert sorted(row["episode_environment_failed"] for row in steps) == [0.0, 1 / size]
    assert not served_processes(work / "scratch" / "server") and not marked_processes(str(THEIRS))
