"""Stages sample from models that see, by a real vLLM: what they keep trains the next stages."""

import json
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from stages.core.errors import DataError
from stages.hubs.builtin import digits, qwen3_vl
from stages.kinds.generate import run as generation
from stages.kinds.generate.config import GenerateConfig
from stages.kinds.serve import run as serve
from stages.kinds.serve.config import ServeConfig
from stages.kinds.train import run as training
from tests.pipeline.test_grpo import named_vllm
from tests.train_stage import finish_again, logged, make_config, make_context, run_to_end

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
    return {"model": model, "rows": folder / "digits", "base": folder / "base"}


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


def sampling(**more):
    return {"max_completion_length": 4, "serving": {name: SERVING[name] for name in SERVING if name != "dtype"}, **more}


def grpo(steps, processes=1, options=None, **fields):
    options = {**sampling(num_generations=8, rewards={"right": {"type": "exact_match"}}), **(options or {})}
    layout = {"dp_shard": processes, "micro_batch_size": 1}
    batch = {"global_batch_size": 256, "layout": layout, "schedule": "constant"}
    execution = {"checkpoint_every_steps": 2, "checkpoints_kept": 9}
    data = {"dataset": "rows", "sequence_length": 512}
    own = {"grpo": options, "data": data, "execution": execution, "learning_rate": 1e-4}
    return make_config("grpo", steps=steps, model="model", **batch, **own, **fields)


def test_rewards_of_answers_to_pictures_rise_and_a_resumed_training_is_the_same(inputs, tmp_path):
    """The server sees with the newest tower at each step, and what is learned does not depend on interruptions."""
    config, work = grpo(16), tmp_path / "work"
    make_context(work, inputs, config)
    run_to_end(work, config)
    rows = logged(work)
    assert max(row["mismatch_mean"] for row in rows) < 1e-4
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[-4:]) > sum(rewards[:4])
    before, after = (load_file(folder / "model" / "model.safetensors") for folder in (inputs["model"], work))
    moved = {name.split(".")[1] for name in after if not torch.equal(before[name], after[name])}
    assert {"visual", "language_model"} <= moved, "the tower learns, too"
    recorded = json.loads((work / "log_probabilities.json").read_text())
    assert recorded["documents"][0]["pictures"], "by which later stages compare what they make of the model"
    again = tmp_path / "again"
    finish_again(work, 14, again, inputs, config)
    assert [row["reward"] for row in logged(again)][-2:] == rewards[-2:]
    for name, tensor in load_file(again / "model" / "model.safetensors").items():
        assert torch.equal(tensor, after[name]), name


@pytest.mark.parametrize("adapter", [None, {"rank": 4}], ids=["whole", "adapter"])
def test_two_processes_beside_their_server_learn_what_one_does(inputs, tmp_path, adapter):
    """Two processes share their devices with the server, which sleeps while they learn, or leave it its own."""
    colocated = {"placement": "colocated", "data_parallel_size": 1}
    runs = {"one": (1, {}), "colocated": (2, colocated)} | ({} if adapter else {"two": (2, {})})
    found = {}
    for name, (processes, options) in runs.items():
        config = grpo(3, processes, options, **({"adapter": adapter} if adapter else {}))
        make_context(tmp_path / name, inputs, config)
        run_to_end(tmp_path / name, config)
        rows = logged(tmp_path / name)
        assert max(row["mismatch_mean"] for row in rows) < 1e-4
        found[name] = [[row[what] for what in ("loss", "grad_norm", "reward")] for row in rows]
    assert all(row[1] > 0 for row in found["one"]), "or nothing is learned"
    for name in found:
        assert found[name] == [pytest.approx(row, rel=1e-6, abs=1e-6) for row in found["one"]]
    log = (tmp_path / "colocated" / "server.log").read_text()
    assert log.count('"POST /sleep?level=') == 3


def test_a_server_that_others_started_answers_about_pictures_with_new_weights(inputs, tmp_path):
    model = inputs["model"] / "model"
    with named_vllm(model, tmp_path / "named", "--max-model-len", "512", "--enable-scale-out") as server:
        config = grpo(3, options={"server": server, "serving": {}})
        make_context(tmp_path / "work", inputs, config)
        run_to_end(tmp_path / "work", config)
    assert max(row["mismatch_mean"] for row in logged(tmp_path / "work")) < 1e-4


def test_the_running_server_of_a_serve_stage_is_asked_about_pictures(inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sk-of-a-refresh")
    config = ServeConfig.model_validate({"kind": "serve", "model": "model", "serving": SERVING})
    handler = signal.getsignal(signal.SIGTERM)
    serving = serve.run(config, make_context(tmp_path / "served", inputs, config))
    try:
        lease = next(serving).lease
        tree = {"kind": "generate", "model": "served", "prompts": {"dataset": "rows", "limit": 4}, "max_tokens": 6}
        artifacts = {"served": tmp_path / "served", "rows": inputs["rows"], "model": inputs["model"]}
        config = GenerateConfig.model_validate(tree)
        context = replace(make_context(tmp_path / "made", artifacts, config), leases={"served": lease})
        assert generation.run(config, context).metrics["num_completions"] == 4
        assert not (tmp_path / "made" / "server.log").exists(), "a server of its own was not needed"
        elsewhere = lease.model_copy(update={"engine_folder": tmp_path / "elsewhere"})
        context = replace(make_context(tmp_path / "again", artifacts, config), leases={"served": elsewhere})
        with pytest.raises(DataError, match="reached on the machine that runs served alone"):
            generation.run(config, context)
    finally:
        serving.close()
        signal.signal(signal.SIGTERM, handler)


def test_a_frozen_tower_stays_while_answers_are_learned(inputs, tmp_path):
    config, work = grpo(2, freeze=["vision_tower"]), tmp_path / "work"
    training.run(config, make_context(work, inputs, config))
    before, after = (load_file(folder / "model" / "model.safetensors") for folder in (inputs["model"], work))
    assert all(torch.equal(before[name], after[name]) for name in after if "visual.blocks" in name)
    assert max(row["mismatch_mean"] for row in logged(work)) < 1e-4


def test_a_teacher_scores_the_models_own_answers_to_pictures(inputs, tmp_path):
    """On-policy distillation: the student, which a probe with pictures checks, answers, and comes nearer."""
    artifacts = {"model": inputs["base"], "teacher": inputs["model"], "rows": inputs["rows"]}
    fields = {"teacher": "teacher", "distill": {"lmbda": 1.0, "sampling": sampling()}, "schedule": "constant"}
    _, metrics = trained(tmp_path / "work", artifacts, "distill", steps=12, learning_rate=3e-4, **fields)
    assert metrics["on_policy"] == 1
    losses = [row["loss"] for row in logged(tmp_path / "work")]
    assert sum(losses[-4:]) < sum(losses[:4])
