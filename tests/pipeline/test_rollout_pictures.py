"""Stages sample from models that see, by a real vLLM: what they keep trains the next stages."""

import json

import pytest

from stages.hubs.builtin import digits, qwen3_vl
from stages.kinds.generate import run as generation
from stages.kinds.generate.config import GenerateConfig
from stages.kinds.train import run as training
from tests.train_stage import make_config, make_context

pytestmark = pytest.mark.nightly
SERVING = {"max_model_len": 256, "enforce_eager": True, "kv_cache_memory_gib": 0.0625, "dtype": "float32"}
NUM_PROMPTS = 16


def trained(work, inputs, method="sft", **fields):
    """Train on pictures, and return the artifact's folder with its metrics."""
    fields = {"global_batch_size": 1, "layout": {"micro_batch_size": 1}, "model": "model", **fields}
    data = {"dataset": "rows", "sequence_length": 512, **fields.pop("data", {})}
    config = make_config(method, data=data, **fields)
    return work, training.run(config, make_context(work, inputs, config)).metrics


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Provide drawn digits, and a model that has begun to read them."""
    folder = tmp_path_factory.mktemp("inputs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "NUM_ROWS", {"train": 2000, "validation": 100, "test": 0})
        for name, make in (("base/model", qwen3_vl.make), ("digits/data", digits.make)):
            (folder / name).mkdir(parents=True)
            make(folder / name)
    base = {"model": folder / "base", "rows": folder / "digits"}
    model, _ = trained(folder / "sft", base, steps=120, warmup_steps=10)
    return {"model": model, "rows": folder / "digits"}


@pytest.mark.parametrize(
    ("keep", "method"), [("best", "sft"), ({"above": 0.5}, "sft"), ("pairs", "dpo")], ids=["best", "above", "pairs"]
)
def test_what_is_kept_of_answers_to_pictures_trains_the_next_stage(inputs, tmp_path, keep, method):
    tree = {"kind": "generate", "model": "model", "keep": keep, "rewards": {"right": {"type": "exact_match"}}}
    sampling = {"num_samples": 6, "max_tokens": 6, "serving": SERVING}
    prompts = {"dataset": "rows", "limit": NUM_PROMPTS}
    config = GenerateConfig.model_validate({**tree, **sampling, "prompts": prompts})
    made = tmp_path / "made"
    metrics = generation.run(config, make_context(made, inputs, config)).metrics
    assert metrics["num_completions"] == 6 * NUM_PROMPTS
    assert 0 < metrics["reward"] < 1, "of a model that has begun to read"
    rows = [json.loads(line) for line in (made / "data" / "train.jsonl").read_text().splitlines()]
    assert len(rows) == metrics["num_rows"]
    assert {name for row in rows for name in row["images"]} == {
        path.relative_to(made / "data").as_posix() for path in (made / "data" / "media").iterdir()
    }
    _, learned = trained(tmp_path / "next", {"model": inputs["model"], "rows": made}, method, steps=2)
    assert learned["num_media"] == len(rows) * (2 if method == "dpo" else 1)
