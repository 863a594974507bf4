"""GRPO in two environments at once, tools and a Python class: a real vLLM samples turns from the newest weights."""

import json
from collections import Counter
from pathlib import Path

import pytest
from pyarrow import parquet
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from stages.hubs.builtin import qwen3_tools
from stages.rollouts.episode_table import round_files
from tests.serving import served_processes
from tests.train_stage import logged, make_config, make_context, run_to_end

GAME = """
class Environment:
    def reset(self, row, seed):
        self.turns = 0
        return "Write digits."

    def step(self, action):
        self.turns += 1
        share = sum(letter in "0123456789" for letter in action["text"]) / 10
        return "More.", share, self.turns == 2
"""


@pytest.mark.nightly
def test_two_environments_are_learned_in_their_shares(tmp_path: Path) -> None:
    """`make test` covers shares, rewards and metrics with a scripted server, in `test_several_environments.py`."""
    artifacts = {name: tmp_path / name for name in ("base", "problems", "games")}
    model = artifacts["base"] / "model"
    model.mkdir(parents=True)
    qwen3_tools.make(model)
    rows = {
        "problems": [{"prompt": f"What is {number} * 12?", "answer": "1"} for number in range(16)],
        "games": [{"prompt": f"Game {number}."} for number in range(9)],
    }
    for name, some in rows.items():
        (artifacts[name] / "data").mkdir(parents=True)
        (artifacts[name] / "data" / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in some))
    tokenizer = AutoTokenizer.from_pretrained(model)
    weights = load_file(model / "model.safetensors")
    (embedding,) = (name for name in weights if "embed_tokens" in name)
    weights[embedding][tokenizer.convert_tokens_to_ids("<|im_end|>")] *= 10  # or turns would hardly ever end
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    (tmp_path / "game.py").write_text(GAME)
    options = {
        "num_generations": 4,
        "max_completion_length": 16,
        "serving": {"enforce_eager": True, "kv_cache_memory_gib": 0.0625},
        "rewards": {"like": {"type": "regex", "pattern": "e"}},  # what an untrained model can learn
        "environments": {
            "sums": {"environment": {"tools": ["calculator"]}, "weight": 2},
            "game": {"environment": {"python": str(tmp_path / "game.py")}, "dataset": "games", "rewards": []},
        },
    }
    texts = {"dataset": "problems", "sequence_length": 192}
    config = make_config("grpo", steps=4, global_batch_size=24, data=texts, grpo=options)
    work = make_context(tmp_path / "work", artifacts, config).work
    run_to_end(work, config)
    steps, files = logged(work), round_files(work)
    assert [row["step"] for row in steps] == [1, 2, 3, 4] == list(files)
    assert max(row["mismatch_mean"] for row in steps) < 1e-4, "the trainer learns the tokens that were sampled"
    total: Counter[str] = Counter()
    for row, file in zip(steps, files.values(), strict=True):
        episodes = parquet.read_table(file).to_pylist()
        total += (counts := Counter(one["environment"] for one in episodes))
        for name in ("sums", "game"):
            own = [one for one in episodes if one["environment"] == name]
            assert row[f"episode_share.{name}"] == counts[name] / 24
            assert row[f"reward.{name}"] == pytest.approx(sum(one["total"] for one in own) / counts[name])
            assert row[f"episode_turns.{name}"] == pytest.approx(sum(one["turns"] for one in own) / counts[name])
        # all episodes of a group, four in a row, are of one prompt
        groups = [episodes[first : first + 4] for first in range(0, 24, 4)]
        assert all(len({(one["environment"], one["row"]) for one in group}) == 1 for group in groups)
        assert all((one["reward_like"] is None) == (one["environment"] == "game") for one in episodes)
    assert total["sums"] == 2 * total["game"] == 64
    assert len({row["reward_environment"] for row in steps}) > 1
    assert not served_processes(work / "scratch" / "server")
