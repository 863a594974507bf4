"""A refresh that learns tasks of Reasoning Gym, which make the rows themselves, and is asked others of them."""

import json

import pytest
from pyarrow import parquet
from refreshes import Home, states

from stages.rollouts.episode_table import round_files

RECIPE = """
name: gym
stages:
  base: {kind: download, model: builtin/qwen3-tools-1m}
  grpo:
    kind: train
    method: grpo
    model: base
    data: {sequence_length: 128, evaluation_fraction: 0.25}
    grpo:
      num_generations: 4
      max_completion_length: 8
      environment: {reasoning_gym: chain_sum, options: {max_terms: 2, max_digits: 1}, size: 40}
      rewards: {like: {type: regex, pattern: "e"}}    # what an untrained model can learn
      serving: {enforce_eager: true, kv_cache_memory_gib: 0.0625}
    steps: 2
    global_batch_size: 32
    layout: {micro_batch_size: 8}
    learning_rate: 1.0e-4
    precision: fp32
    export_dtype: float32
    execution: {evaluate_every_steps: 1}
  solved:
    kind: generate
    model: grpo
    prompts: {}
    environment: {reasoning_gym: chain_sum, options: {max_terms: 2, max_digits: 1}, size: 8, seed: 40}
    num_samples: 2
    max_tokens: 8
    keep: {solved: [0, 2]}
    serving: &serving {max_model_len: 128, enforce_eager: true, kv_cache_memory_gib: 0.0625, dtype: float32}
  evaluate:
    kind: evaluate
    model: grpo
    serving: *serving
    harness: environment
    tasks: [sums]
    episodes:
      environment: {reasoning_gym: chain_sum, options: {max_terms: 2, max_digits: 1}, size: 20, seed: 100}
    generation: {max_tokens: 8}
"""


@pytest.mark.nightly
def test_rows_that_a_task_makes_are_learned_answered_and_asked(tmp_path):
    """`make test` covers rows, scores and refusals in `test_reasoning_gym.py` of the unit tests."""
    recipe = tmp_path / "gym.yaml"
    recipe.write_text(RECIPE)
    home = Home(tmp_path / "home")
    try:
        first = json.loads(home.lifecycle("run", str(recipe), "--json").stdout)
        assert set(states(first).values()) == {"built"}, json.dumps(first)[-3000:]
        metrics = {name: stage["metrics"] for name, stage in first["stages"].items()}
        assert 0 <= metrics["grpo"]["reward_environment"] <= 1
        assert metrics["grpo"]["num_held_out_prompts"] > 0 and "evaluation_reward_environment" in metrics["grpo"]
        assert metrics["evaluate"]["sums.environment"] <= 1
        folder = next((home.folder / "store" / "train").glob(f"grpo-{first['stages']['grpo']['version']}"))
        assert [parquet.read_table(file).num_rows for file in round_files(folder).values()] == [32, 32]
        generated = next((home.folder / "store" / "generate").glob(f"solved-{first['stages']['solved']['version']}"))
        rows = [json.loads(line) for line in (generated / "data" / "train.jsonl").read_text().splitlines()]
        assert [row["reasoning_gym"]["index"] for row in rows] == [*range(8)], "rows to learn from by another stage"
        again = json.loads(home.lifecycle("run", str(recipe), "--json").stdout)
        assert set(states(again).values()) == {"cached"}
    finally:
        home.lifecycle("down")
