"""SFT and DPO train stages learn, and leave their artifacts and reports but no other files."""

import io
import json
import math
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.launch import local
from stages.core.contract import StageInput, StageResult
from stages.data.summaries import LENGTHS_FILE, Lengths
from stages.kinds.train.run import run
from stages.models.recorded import TRAINED_ON_FILE, trained_on_conversations
from tests.damage import flip_bit
from tests.train_stage import logged, make_artifacts, make_config, make_context, run_to_end, start

NUM_SFT_STEPS, NUM_DPO_STEPS = 30, 12
RATES = {"step_time_s", "tokens_per_s", "real_tokens_per_s", "tokens_per_s_per_device", "real_tokens_per_s_per_device"}
SHARES = {"mfu", "data_wait_fraction", "padding_fraction"}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    return make_artifacts(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="module")
def sft(artifacts, tmp_path_factory):
    """Provide the work folder of an SFT stage on one process."""
    work = tmp_path_factory.mktemp("sft") / "work"
    config = make_config(
        steps=NUM_SFT_STEPS,
        warmup_steps=5,
        export_dtype="bfloat16",
        execution={"evaluate_every_steps": 10, "log_every_steps": 2},
    )
    make_context(work, artifacts, config)
    run_to_end(work, config)
    return work


@pytest.fixture(scope="module")
def dpo(artifacts, sft, tmp_path_factory):
    """Provide the work folder of a DPO stage on two processes, which trained the SFT stage's model."""
    work = tmp_path_factory.mktemp("dpo") / "work"
    config = make_config("dpo", steps=NUM_DPO_STEPS, layout={"dp_shard": 2, "micro_batch_size": 2}, learning_rate=1e-3)
    make_context(work, {**artifacts, "base": sft}, config)
    run_to_end(work, config)
    return work


@pytest.fixture(scope="module")
def margin(artifacts, sft, tmp_path_factory):
    """Provide the work folder of a train stage with a method that only this test registers."""
    work = tmp_path_factory.mktemp("margin") / "work"
    context = make_context(work, {**artifacts, "base": sft}, make_config("dpo", steps=NUM_DPO_STEPS))
    stage_input = StageInput.model_validate_json((work / "config.json").read_text())
    config = {**stage_input.config, "method": "margin", "dpo": None}
    (work / "config.json").write_text(stage_input.model_copy(update={"config": config}).model_dump_json())
    program = "import tests.margin_method; from stages.__main__ import main; main()"
    environment = local.environment(make_config("dpo"))
    subprocess.run([sys.executable, "-c", program, work], check=True, env=environment, timeout=300)
    return context.work


def read_result(work):
    return StageResult.model_validate_json((work / "result.json").read_text())


def test_sft_learns(sft):
    rows = logged(sft)
    assert rows[0]["loss"] > math.log(288) * 0.8
    assert read_result(sft).metrics["evaluation_loss"] < 0.6 * rows[0]["loss"]


@pytest.fixture(scope="module")
def few_rows(artifacts, tmp_path_factory):
    """Provide artifacts with so few training rows that the held-out loss soon rises."""
    folder = tmp_path_factory.mktemp("few")
    (folder / "data").mkdir()
    for split, num_rows in (("train", 8), ("validation", 40)):
        lines = (artifacts["problems"] / "data" / f"{split}.jsonl").read_text().splitlines(keepends=True)
        (folder / "data" / f"{split}.jsonl").write_text("".join(lines[:num_rows]))
    return {**artifacts, "problems": folder}


def overfitted(work, few_rows, keep, **layout):
    """Train on few rows until overfitted; return evaluation losses by step, final metrics, and warnings."""
    config = make_config(
        steps=60,
        learning_rate=1e-2,
        keep=keep,
        layout={"micro_batch_size": 2, **layout},
        execution={"evaluate_every_steps": 5, "checkpoint_every_steps": 20, "checkpoints_kept": 1},
    )
    make_context(work, few_rows, config)
    run_to_end(work, config)
    losses = {row["step"]: row["evaluation_loss"] for row in logged(work) if "evaluation_loss" in row}
    events = [json.loads(line) for line in (work / "events.jsonl").read_text().splitlines()]
    return losses, read_result(work).metrics, [event["message"] for event in events if event["event"] == "warning"]


def rightmost(picture, series):
    """Return the rightmost pixel column that has a curve's colour, to check where the curve in a plot ends."""
    pixels = imread(picture)[..., :3]
    return np.flatnonzero((abs(pixels - to_rgb(f"C{series}")) < 0.01).all(axis=-1).any(axis=0)).max()


def test_the_weights_of_the_best_step_are_kept_where_the_recipe_says_so(few_rows, tmp_path):
    # Of two processes, one alone knows the losses of earlier steps; both must go back.
    losses, metrics, warnings = overfitted(tmp_path / "best", few_rows, "best", dp_shard=2)
    best = min(losses.values())
    assert metrics["evaluation_loss"] == pytest.approx(best, rel=1e-6)
    assert not [one for one in warnings if "held-out" in one]  # of two processes, some steps may be slow to exchange
    picture = tmp_path / "best" / "plots" / "loss.png"
    assert rightmost(picture, series=1) >= rightmost(picture, series=0)  # held out to the end, as the training loss is
    again = make_config(steps=1, learning_rate=1e-12, execution={"log_every_steps": 1})
    make_context(tmp_path / "again", {**few_rows, "base": tmp_path / "best"}, again)
    run_to_end(tmp_path / "again", again)
    assert read_result(tmp_path / "again").metrics["evaluation_loss"] == pytest.approx(best, rel=1e-4)


def test_a_held_out_loss_that_rises_again_is_warned_of(few_rows, tmp_path):
    losses, metrics, [warning] = overfitted(tmp_path / "last", few_rows, "last")
    step = min(losses, key=losses.get)
    assert metrics["evaluation_loss"] > min(losses.values())
    assert f"was {losses[step]:.4g} at step {step}: it has risen again" in warning


def test_what_was_learned_from_conversations_is_to_be_asked_as_a_chat(sft, dpo):
    assert [trained_on_conversations(work / "model") for work in (sft, dpo)] == [True, True]


def test_sft_logs_the_steps_that_were_asked_for(sft):
    rows = logged(sft)
    assert [row["step"] for row in rows] == [1, *range(2, NUM_SFT_STEPS + 1, 2)]
    assert [row["step"] for row in rows if "evaluation_loss" in row] == [10, 20]
    assert all(row.keys() >= RATES for row in rows)


def test_it_takes_little_time_to_the_first_step(artifacts, tmp_path):
    """A train stage needs less than 12 s of CPU time until the end of its first step.

    The best of three counts. On an idle machine the CPU time is nearly all of the time.
    """
    assert any(processor_s_to_first_step(tmp_path / str(number), artifacts) < 12 for number in range(3))


def processor_s_to_first_step(work, artifacts):
    """Return the CPU seconds that a train stage uses until its first step is logged."""
    config = make_config(steps=1)
    make_context(work, artifacts, config)
    with start(work, config) as process:
        while not (work / "metrics.jsonl").exists() or not logged(work):
            assert process.poll() is None, (work / "log.txt").read_text()[-4000:]
            time.sleep(0.01)
        spent = psutil.Process(process.pid).cpu_times()
    assert process.returncode == 0
    return spent.user + spent.system


def test_the_result_sums_up_the_run(sft):
    result = read_result(sft)
    assert result.metrics.keys() >= RATES | SHARES | {"loss", "evaluation_loss", "num_tokens", "peak_memory_gib"}
    assert result.tags["engine"] == "fsdp"
    assert result.tags["layout"] == "fsdp micro_batch_size=2"
    assert "measured" in result.tags["peak"]
    assert 0 < result.metrics["mfu"] < 1
    assert result.metrics["real_tokens_per_s"] <= result.metrics["tokens_per_s"]
    assert result.files == ["plots/loss.png"]
    assert (sft / "plots" / "loss.png").read_bytes().startswith(b"\x89PNG")
    lengths = Lengths.model_validate_json((sft / LENGTHS_FILE).read_bytes())
    assert sum(lengths.counts[""]) == result.metrics["num_documents"]


def test_memory_stays_flat(sft):
    peaks = [row["peak_memory_gib"] for row in logged(sft)]
    assert peaks[-1] < 1.05 * peaks[len(peaks) // 2]


def test_progress_reaches_the_end(sft):
    events = [json.loads(line) for line in (sft / "events.jsonl").read_text().splitlines()]
    steps = [event["done"] for event in events if event.get("unit") == "steps"]
    assert steps[-1] == NUM_SFT_STEPS
    assert steps == sorted(steps)


def test_the_exported_folder_is_loaded_by_transformers_in_the_dtype_asked_for(sft, artifacts):
    folder = sft / "model"
    assert {weight.dtype for weight in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(folder).chat_template
    names = {path.name for path in (artifacts["base"] / "model").iterdir()}
    assert {path.name for path in folder.iterdir()} == names | {TRAINED_ON_FILE}


def test_the_first_dpo_loss_is_ln_2(dpo):
    assert logged(dpo)[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert logged(dpo)[0]["reward_margin"] == pytest.approx(0, abs=1e-5)


def test_dpo_raises_the_margin(dpo):
    rows = logged(dpo)
    assert rows[-1]["loss"] < 0.9 * math.log(2)
    assert rows[-1]["reward_margin"] > 0.1
    assert rows[-1]["preference_accuracy"] > 0.8
    assert read_result(dpo).metrics.keys() >= {
        "evaluation_loss",
        "evaluation_reward_margin",
        "evaluation_preference_accuracy",
    }


def test_a_method_that_is_only_registered_trains_a_model(margin):
    rows, metrics = logged(margin), read_result(margin).metrics
    first = rows[0]["answer_margin"]
    assert rows[0]["loss"] >= math.log(1 + math.exp(0.5 - 2 * first)), "Jensen: the loss is convex in the margin"
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
    assert rows[-1]["answer_margin"] > first
    assert list(metrics)[:2] == ["evaluation_loss", "evaluation_answer_margin"]
    assert not (margin.parent / "cache" / "reference").exists(), "it asks for no reference"
    assert (margin / "model" / "model.safetensors").is_file()


def test_communication_of_two_processes_is_measured(dpo):
    assert [row["step"] for row in logged(dpo) if "communication_fraction" in row] == [3]
    assert read_result(dpo).tags["layout"] == "fsdp dp_shard=2 micro_batch_size=2"


def test_the_reference_is_computed_once(dpo, sft, artifacts, tmp_path):
    kept = sorted((dpo.parent / "cache" / "reference").glob("*.npy"))
    entries = [(path.stat().st_ino, path.read_bytes()) for path in kept]
    assert len(entries) == 2, "training rows and held-out rows"
    flip_bit(kept[1], kept[1].stat().st_size - 1)
    work = dpo.parent / "again"
    config = make_config("dpo", steps=NUM_DPO_STEPS, layout={"micro_batch_size": 4}, learning_rate=1e-3)
    run(config, make_context(work, {**artifacts, "base": sft}, config))
    assert (kept[0].stat().st_ino, kept[0].read_bytes()) == entries[0]
    assert np.load(kept[1]) == pytest.approx(np.load(io.BytesIO(entries[1][1])), abs=1e-3), "it was damaged"
    assert f"{kept[1]} was damaged, so they are computed again" in (work / "events.jsonl").read_text()
    losses, of_two = ([row["loss"] for row in logged(folder)] for folder in (work, dpo))
    assert losses == pytest.approx(of_two, abs=1e-5)
