"""Megatron training survives a killed or hanging rank and a truncated checkpoint, and reports a lack of memory."""

import os
import re
import resource
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import tiny
from safetensors.torch import load_file

from flows.launch import local
from flows.launch.failures import failure_of
from stages.core.errors import ResourceError, StageCrashError, TransientError
from stages.core.process_tree import living_processes, marked_processes
from stages.kinds.train import checkpoints
from stages.kinds.train.prediction import PREDICTION_FILE
from tests.listening import reachable_from_elsewhere
from tests.train_stage import logged, make_artifacts, make_config, make_context, ranks_of, run_to_end, start_forked

NUM_STEPS, SAVE_EVERY = 12, 3
TP2, PP2 = {"tp": 2, "micro_batch_size": 2}, {"pp": 2, "micro_batch_size": 2}
HANG_TIMEOUT_S = 30.0
"""Seconds after which a training step counts as hanging; loading the model must take less, even on a slow machine."""
NUM_MANY_ROWS = 1024
"""Number of rows in a micro-batch that needs about 2 GiB of memory, more than the test allows."""
HEADROOM_BYTES = 2**30


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    return make_artifacts(tmp_path_factory.mktemp("artifacts"))


def megatron_config(layout, **fields):
    execution = {
        "checkpoint_every_steps": SAVE_EVERY,
        "measure_matmul_rate": False,
        "threads": 1,
        **fields.pop("execution", {}),
    }
    return make_config(engine="megatron", steps=NUM_STEPS, warmup_steps=3, layout=layout, execution=execution, **fields)


def start(work, artifacts, config):
    make_context(work, artifacts, config)
    return local.start(work, config)


def end_of(process):
    return tiny.eventually(lambda: process.poll() is not None, "the stage did not end") and process.poll()


def run_again(work, artifacts, config):
    make_context(work, artifacts, config)
    run_to_end(work, config)


def log_of(work):
    return (work / "log.txt").read_text()


def rank_of(process, rank):
    """Return the process id of rank `rank` of the training, once it has begun."""

    def found():
        for pid in marked_processes(process.token):
            with suppress(OSError):  # it has ended since
                if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return pid
        return None

    return tiny.eventually(found, f"there is no rank {rank}")


def wait_for_a_checkpoint(work):
    tiny.eventually((work / "scratch" / "checkpoints" / f"step-{SAVE_EVERY}").exists, "no checkpoint")


@pytest.fixture(scope="module")
def uninterrupted(artifacts, tmp_path_factory):
    """Provide the work folder of a training run without interruption."""
    work = tmp_path_factory.mktemp("uninterrupted") / "work"
    run_again(work, artifacts, megatron_config(TP2))
    return work


def weights_of(work):
    return (work / "model" / "model.safetensors").read_bytes()


def test_after_a_rank_was_killed_the_next_run_ends_with_the_very_weights(artifacts, uninterrupted, tmp_path):
    work = tmp_path / "work"
    process = start(work, artifacts, megatron_config(TP2))
    ranks = [rank_of(process, rank) for rank in (0, 1)]
    wait_for_a_checkpoint(work)
    os.kill(ranks[1], signal.SIGSTOP)  # or all steps might be done before it is killed
    assert not reachable_from_elsewhere(marked_processes(process.token))
    os.kill(ranks[1], signal.SIGKILL)
    error = failure_of(work, "trained", end_of(process))
    assert not {*ranks} & set(living_processes())
    assert not marked_processes(process.token)
    assert len(logged(work)) < NUM_STEPS
    assert isinstance(error, StageCrashError)
    assert "rank 1 was killed by SIGKILL" in str(error)
    run_again(work, artifacts, megatron_config(TP2))
    assert "continuing from the checkpoint of step" in log_of(work)
    assert weights_of(work) == weights_of(uninterrupted)
    assert [row["loss"] for row in logged(work)] == [row["loss"] for row in logged(uninterrupted)]


def test_a_hung_collective_ends_with_the_stacks_in_the_log_and_the_next_attempt_goes_on(
    artifacts, uninterrupted, tmp_path
):
    work = tmp_path / "work"
    config = megatron_config(PP2, execution={"hang_timeout_s": HANG_TIMEOUT_S})
    make_context(work, artifacts, config)
    parent, wait = start_forked(work, config)
    ranks = ranks_of(parent, config.processes)
    wait_for_a_checkpoint(work)
    os.kill(ranks[1], signal.SIGSTOP)
    error = failure_of(work, "trained", wait())
    assert len(logged(work)) < NUM_STEPS
    assert isinstance(error, TransientError)
    # The step or its checkpoint: which of the two the signal meets is a matter of milliseconds.
    step = r"rank 0: (the checkpoint of )?step \d+"
    assert re.search(rf"{step} has taken more than 30 s \(execution\.hang_timeout_s\)", str(error))
    assert re.search(rf"{step}.*its threads:\n.*thread MainThread:.*in _train_one_step", log_of(work), re.DOTALL)
    run_again(work, artifacts, megatron_config(PP2))
    assert "continuing from the checkpoint of step" in log_of(work)
    assert_nearly_equal(work, uninterrupted, artifacts["base"])


def assert_nearly_equal(work, uninterrupted, base):
    """Check for nearly the uninterrupted weights, relative to training's movement: layouts sum in different orders."""
    resumed, expected, before = (
        load_file(folder / "model" / "model.safetensors") for folder in (work, uninterrupted, base)
    )
    for name, weight in expected.items():
        assert (resumed[name] - weight).norm() < 1e-3 * (weight - before[name]).norm(), name


def test_of_a_checkpoint_that_was_cut_off_the_one_before_is_used(artifacts, uninterrupted, tmp_path):
    work = tmp_path / "work"
    shutil.copytree(uninterrupted, work)
    shutil.rmtree(work / "model")
    folder = work / "scratch" / "checkpoints"
    (_, latest), (step_before, _) = checkpoints.complete_checkpoints(folder)
    with (latest / "__1_0.distcp").open("ab") as stream:
        stream.truncate(100)
    (folder / f"partial-step-{NUM_STEPS + SAVE_EVERY}").mkdir()
    run_again(work, artifacts, megatron_config(TP2))
    assert f"continuing from the checkpoint of step {step_before}" in log_of(work)
    assert weights_of(work) == weights_of(uninterrupted)


def test_a_run_that_gets_no_memory_says_what_was_predicted_and_what_needs_less(artifacts, tmp_path):
    work = tmp_path / "work"
    layout = {"micro_batch_size": NUM_MANY_ROWS}
    process = start(work, artifacts, megatron_config(layout, global_batch_size=NUM_MANY_ROWS))
    pid = tiny.eventually(lambda: rank_of_only(process), "the stage did not start")
    tiny.eventually((work / PREDICTION_FILE).exists, "no prediction")
    limit_memory(pid, HEADROOM_BYTES)
    error = failure_of(work, "trained", end_of(process))
    assert isinstance(error, ResourceError)
    assert re.search(r"ran out of memory under the layout .*; predicted \d+\.\d GiB a process", str(error))
    assert f"lower layout.micro_batch_size (now {NUM_MANY_ROWS}), layout.recompute: full (now none)" in str(error)


def rank_of_only(process):
    """Return the process id of a stage with a single process, the supervisor's only child; None before it starts."""
    return next((pid for pid, (parent, _) in living_processes().items() if parent == process.pid), None)


def limit_memory(pid, headroom_bytes):
    """Limit the memory that a process may map beyond its present mappings to `headroom_bytes`."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + headroom_bytes
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))
