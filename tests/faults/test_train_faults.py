"""Training that is killed resumes at its last checkpoint, and training that cannot work fails before slow steps."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from stages.core.errors import LayoutError, ModelError, ResourceError, TrainingError, TransientError
from stages.core.process_tree import descendants, send
from stages.hubs.builtin import addition_preferences
from stages.kinds.train import checkpoints
from stages.kinds.train.run import run
from tests.listening import reachable_from_elsewhere
from tests.train_stage import logged, make_artifacts, make_config, make_context, ranks_of, run_to_end, start_forked

NUM_STEPS, SAVE_EVERY = 24, 4
HANG_TIMEOUT_S = 30.0
"""Seconds after which a training step counts as hanging; loading the model must take less, even on a slow machine."""
TWO_PROCESSES = {"dp_shard": 2, "micro_batch_size": 2}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    return make_artifacts(tmp_path_factory.mktemp("artifacts"))


def make_long_config(layout):
    execution = {"checkpoint_every_steps": SAVE_EVERY, "measure_matmul_rate": False}
    return make_config(steps=NUM_STEPS, warmup_steps=5, layout=layout, execution=execution)


@pytest.fixture(scope="module")
def uninterrupted(artifacts, tmp_path_factory):
    """Provide the work folder of a training on two processes without interruption."""
    work = tmp_path_factory.mktemp("uninterrupted") / "work"
    config = make_long_config(TWO_PROCESSES)
    make_context(work, artifacts, config)
    run_to_end(work, config)
    return work


@pytest.fixture(scope="module")
def killed(artifacts, tmp_path_factory):
    """Provide the work folder of a training on two processes, one of which was killed."""
    work = tmp_path_factory.mktemp("killed") / "work"
    config = make_long_config(TWO_PROCESSES)
    for _ in range(5):  # on a busy machine it may have ended before it is killed
        shutil.rmtree(work, ignore_errors=True)
        make_context(work, artifacts, config)
        parent, wait = start_forked(work, config)
        ranks = ranks_of(parent, config.processes)
        tiny.eventually((work / "scratch" / "checkpoints" / f"step-{2 * SAVE_EVERY}").exists, "no checkpoint")
        send(signal.SIGKILL, ranks[-1:])
        if code := wait():
            break
    assert code
    assert not any(is_running(rank) for rank in ranks)
    assert len(logged(work)) < NUM_STEPS
    return work


def is_running(pid):
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "zombie" not in status.read_text()


def test_a_run_whose_rank_was_killed_ends_with_the_very_weights_of_an_uninterrupted_one(
    artifacts, killed, uninterrupted, tmp_path, fault
):
    fault.name, fault.stage = "SIGKILL of a rank, real training", "train"
    work = tmp_path / "work"
    shutil.copytree(killed, work)
    num_logged = len(logged(work))
    config = make_long_config(TWO_PROCESSES)
    make_context(work, artifacts, config)
    with fault.timed("recovered"):
        run_to_end(work, config)
    assert "continuing from the checkpoint of step" in (work / "log.txt").read_text()
    assert (work / "model" / "model.safetensors").read_bytes() == (
        uninterrupted / "model" / "model.safetensors"
    ).read_bytes()
    steps, expected = logged(work), logged(uninterrupted)
    assert 0 < num_logged < NUM_STEPS
    assert [row["step"] for row in steps] == list(range(1, NUM_STEPS + 1))
    assert [row["loss"] for row in steps] == [row["loss"] for row in expected]


def test_a_run_goes_on_with_another_number_of_processes(artifacts, killed, uninterrupted, tmp_path, fault):
    fault.name, fault.stage = "one of two devices lost", "train"
    work = tmp_path / "work"
    shutil.copytree(killed, work)
    with fault.timed("recovered"):
        config = make_long_config({"micro_batch_size": 4})
        run(config, make_context(work, artifacts, config))
    resumed, expected = (load_file(folder / "model" / "model.safetensors") for folder in (work, uninterrupted))
    start_weights = load_file(artifacts["base"] / "model" / "model.safetensors")
    for name, weight in expected.items():
        moved = (weight - start_weights[name]).norm()
        assert (resumed[name] - weight).norm() < 1e-3 * moved, name


def test_a_checkpoint_that_was_cut_off_is_ignored_and_the_one_before_used(artifacts, uninterrupted, tmp_path, fault):
    fault.name, fault.stage, fault.lost = "checkpoint cut off", "train", "steps since the one before"
    work = tmp_path / "work"
    shutil.copytree(uninterrupted, work)
    folder = work / "scratch" / "checkpoints"
    (step, latest), (step_before, _) = checkpoints.complete_checkpoints(folder)
    assert (step, step_before) == (NUM_STEPS, NUM_STEPS - SAVE_EVERY)
    with (latest / "__1_0.distcp").open("ab") as stream:
        stream.truncate(100)
    (folder / f"partial-step-{NUM_STEPS + SAVE_EVERY}").mkdir()
    with fault.timed("detected"):
        assert [step for step, _ in checkpoints.complete_checkpoints(folder)] == [NUM_STEPS - SAVE_EVERY]


def test_a_rank_that_stops_in_the_reference_pass_ends_the_run_which_says_where_it_was(artifacts, tmp_path, fault):
    fault.name, fault.stage = "a rank hangs while DPO's reference is computed", "train"
    (tmp_path / "preferences" / "data").mkdir(parents=True)
    addition_preferences.make(tmp_path / "preferences" / "data")
    execution = {"hang_timeout_s": HANG_TIMEOUT_S, "measure_matmul_rate": False}
    config = make_config("dpo", layout=TWO_PROCESSES, global_batch_size=64, steps=60, execution=execution)
    work = tmp_path / "work"
    make_context(work, {**artifacts, "preferences": tmp_path / "preferences"}, config)
    parent, wait = start_forked(work, config)
    ranks = ranks_of(parent, config.processes)
    events = work / "events.jsonl"
    tiny.eventually(lambda: events.exists() and "reference" in events.read_text(), "no reference pass")
    os.kill(ranks[1], signal.SIGSTOP)
    assert not reachable_from_elsewhere([parent, *descendants(parent)])
    with fault.timed("detected"):
        assert wait() == TransientError.exit_code, "the other rank waits forever"
    failure = json.loads((work / "error.json").read_text())
    assert failure["error"] == TransientError.__name__
    place = r"rank 0: micro-batch \d+ of \d+ of the reference log-probabilities has taken more than 30 s"
    assert re.match(place, failure["message"])
    assert "document_log_probabilities" in (work / "log.txt").read_text()


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_step(artifacts, tmp_path, fault):
    fault.name, fault.stage = "loss is no number", "train"
    config = make_config(learning_rate=1e30, max_grad_norm=None)
    with (
        fault.timed("detected"),
        pytest.raises(TrainingError, match=r"step \d+: the loss is .* the gradient norm (nan|inf)"),
    ):
        run(config, make_context(tmp_path / "work", artifacts, config))
    assert not (tmp_path / "work" / "model").exists()


def test_a_wrong_number_of_processes_is_named_before_anything_is_loaded(artifacts, tmp_path, fault):
    fault.name, fault.stage = "wrong number of processes", "train"
    config = make_config(layout=TWO_PROCESSES)
    context = make_context(tmp_path / "work", artifacts, config)
    with fault.timed("detected"), pytest.raises(LayoutError, match=r"needs 2 processes .*dp_shard=2.* 1 were started"):
        run(config, context)


def test_a_disk_that_is_too_full_for_checkpoints_is_told_before_training(artifacts, tmp_path, monkeypatch, fault):
    fault.name, fault.stage = "no room for checkpoints", "train"
    config = make_config()
    context = make_context(tmp_path / "work", artifacts, config)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with (
        fault.timed("detected"),
        pytest.raises(ResourceError, match=r"3 checkpoints .* 0\.00 GiB are free, 0\.0\d GiB are needed"),
    ):
        run(config, context)
    assert not (tmp_path / "work" / "metrics.jsonl").exists()


def damaged(artifacts, folder, change):
    """Return the artifacts with a copy of the base model, whose weights the function `change` damages."""
    shutil.copytree(artifacts["base"], folder)
    path = folder / "model" / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)
    return {**artifacts, "base": folder}


def test_a_model_with_a_missing_weight_is_refused(artifacts, tmp_path, fault):
    fault.name, fault.stage = "a weight is missing", "train"
    changed = damaged(artifacts, tmp_path / "base", lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with (
        fault.timed("detected"),
        pytest.raises(ModelError, match=r"1 weights are missing .*model\.layers\.1\.mlp\.up_proj\.weight"),
    ):
        run(make_config(), make_context(tmp_path / "work", changed, make_config()))


def test_a_model_with_a_weight_of_another_shape_is_refused(artifacts, tmp_path, fault):
    fault.name, fault.stage = "a weight of another shape", "train"
    changed = damaged(
        artifacts, tmp_path / "base", lambda weights: weights.update({"model.norm.weight": torch.ones(3)})
    )
    with fault.timed("detected"), pytest.raises(ModelError, match=r"model\.norm\.weight"):
        run(make_config(), make_context(tmp_path / "work", changed, make_config()))
