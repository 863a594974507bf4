"""Unsupported sampling options are refused before training, with what to change."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flows.planning.devices import device_notes
from flows.recipe.recipe import load_recipe
from stages.core.contract import StageInput
from stages.hubs.builtin import addition, qwen3
from stages.kinds.train.check import check
from stages.kinds.train.config import TrainConfig

OPTIONS: dict[str, Any] = {"num_generations": 4, "rewards": {"right": {"type": "exact_match"}}}
TRAINING: dict[str, Any] = {
    "kind": "train",
    "method": "grpo",
    "model": "base",
    "data": {"dataset": "problems", "sequence_length": 640},
    "global_batch_size": 8,
    "learning_rate": 1e-4,
}


def make(grpo: dict[str, Any] | None = None, **changed: Any) -> TrainConfig:
    return TrainConfig.model_validate({**TRAINING, "grpo": {**OPTIONS, **(grpo or {})}, **changed})


@pytest.mark.parametrize(
    ("grpo", "changed", "problem"),
    [
        ({"rewards": {}}, {}, r"`grpo\.rewards` is missing"),
        ({"stop": ["\n"] * 65}, {}, "at most 64 items"),
        ({"num_generations": 3}, {}, r"global_batch_size 8 × grpo\.steps_per_generation 1 .* grpo\.num_generations 3"),
        ({"serving": {"max_num_seqs": 2}}, {}, r"grpo\.num_generations: 4 is more than the 2 requests"),
        ({"max_completion_length": 640}, {}, r"grpo\.max_completion_length: is 640.* data\.sequence_length, 640"),
        ({"serving": {"max_model_len": 512}}, {}, r"is 512, .* grpo\.serving\.max_model_len, 512"),
        ({}, {"adapter": {"use_dora": True}}, r"adapter\.use_dora: no server samples from such an adapter"),
        ({}, {"adapter": {"base_precision": "nf4"}}, "different from the server's"),
        ({"beta": 0.1}, {"engine": "megatron"}, "only `engine: fsdp` can hold"),
        (
            {"asynchronous": {"lag": 1}, "placement": "colocated"},
            {},
            r"asynchronous\.lag: 1 samples while .* sleeps then",
        ),
        (
            {"asynchronous": {"lag": 1}, "top_p": 0.5},
            {},
            r"top_p 0\.5 are of the likeliest tokens alone; say `top_p: 1`",
        ),
        ({"asynchronous": {"lag": 17}}, {}, "less than or equal to 16"),
        ({"asynchronous": {"lag": 1}, "importance_sampling_clip_max": 2}, {}, "does nothing with `asynchronous.lag`"),
        ({"replay_experts": True, "asynchronous": {"lag": 1}}, {}, "whose weights the engine no longer has"),
        (
            {"replay_experts": True},
            {"layout": {"compile": True}},
            "`layout.compile` with `engine: fsdp` does not go with `replay_experts`, which looks into each layer",
        ),
        (
            {"replay_experts": True},
            {"engine": "megatron", "layout": {"cp": 2}},
            "depend on the longest micro-batch; set `dp_shard: 2` and `cp: 1`",
        ),
        (
            {"replay_experts": True},
            {"engine": "megatron", "layout": {"pp": 2, "recompute": "full"}},
            '`layout.recompute: full` over `pp: 2` .*; set `recompute: "none"`, the nearest',
        ),
        ({}, {"layout": {"dp_shard": 2}, "execution": {"nodes": 2}}, r"say `execution\.nodes: 1`"),
    ],
)
def test_what_cannot_be_is_named(grpo: dict[str, Any], changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        make(grpo, **changed)


def test_fields_of_rows_do_nothing_for_prompts() -> None:
    idle = dict(make(data={**TRAINING["data"], "evaluation_fraction": 0.1, "turns": "separately"}).idle_fields())
    assert "not over prompts" in idle["data.turns"]
    assert "data.evaluation_fraction" not in idle, "held-out prompts are answered"
    assert "execution.ready_timeout_s" not in idle
    rows = {name: value for name, value in TRAINING.items() if name != "method"}
    assert "execution.ready_timeout_s" in dict(TrainConfig.model_validate({**rows, "method": "sft"}).idle_fields())


def test_a_server_of_its_own_has_devices_of_its_own() -> None:
    recipe = load_recipe(Path(__file__).parents[6] / "configs" / "qwen3-8b-grpo-8gpu.yaml")
    assert recipe.stages["grpo"].devices == 8
    (note,) = device_notes(recipe, list(recipe.stages))
    assert note.startswith("grpo: 4 devices train, 4 sample completions")
    shared = load_recipe(Path(__file__).parents[6] / "configs" / "qwen3-0.6b-grpo-one-gpu.yaml")
    assert shared.stages["grpo"].devices == 1
    assert list(device_notes(shared, ["grpo"])) == [
        "grpo: 1 device in turns for training and sampling; on a CPU both share the cores"
    ]
    assert make().devices == 2
    assert make({"serving": {"tensor_parallel_size": 4}}, layout={"dp_shard": 4}).devices == 8
    assert make().workload.tokens_per_step == 8 * 512 // 640 * 640 + 640, "completions as long as they may be, in rows"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in ("base", "problems")}
    (found["base"] / "model").mkdir()
    (found["problems"] / "data").mkdir()
    qwen3.make(found["base"] / "model")
    addition.make(found["problems"] / "data")
    return found


def problems(config: TrainConfig, inputs: dict[str, Path], cache: Path) -> list[tuple[str, str]]:
    stage_input = StageInput(
        name="rl", kind="train", version="0" * 12, config=config.model_dump(mode="json"), inputs=inputs, cache=cache
    )
    return [(field, str(error)) for field, error in check(stage_input)]


def test_prompts_are_read_before_the_model_is_made(inputs: dict[str, Path], tmp_path: Path) -> None:
    assert problems(make({"max_completion_length": 8}), inputs, tmp_path) == []
    assert problems(make({"max_completion_length": 8, "reference": "solution"}), inputs, tmp_path)[0][0] == "data"
    own = {"rewards": {"own": {"type": "python", "file": str(tmp_path / "score.py"), "function": "score"}}}
    (tmp_path / "score.py").write_text("raise OSError('no such model')")
    ((field, error),) = problems(make({"max_completion_length": 8, **own}), inputs, tmp_path)
    assert field == "grpo.rewards.own"
    assert "no such model" in error


def test_prompts_without_room_for_an_answer_are_named(inputs: dict[str, Path], tmp_path: Path) -> None:
    ((field, error),) = problems(make({"max_completion_length": 639}), inputs, tmp_path)
    assert field == "data"
    assert "do not leave 639 tokens" in error
