"""A sampling server on the training's devices sleeps while the model learns, and answers with new weights afterwards.

The server is a stand-in for vLLM that enforces memory (`tests/vllm_stand_in.py`); this process is the trainer.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from stages.core.contract import StageContext
from stages.core.errors import ServerError, TransientError
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.rollouts.own_server import OwnServer, gpus_beside_training, num_training_here
from stages.kinds.train.rollouts.server import MOST_RESTARTS, RolloutServer
from stages.parallel.host_memory import give_back_freed_memory
from stages.rollouts.asking import Answer, Request
from stages.serving.config import ServingConfig
from stages.serving.held_weights import HeldWeights
from tests.serving import served_processes
from tests.train_stage import make_artifacts, make_config, make_context
from tests.vllm_stand_in import DEVICE_VARIABLE, KV_CACHE_BYTES, Device, StandIn, installed, resident_bytes

MIB = 2**20
MEMORY = 192 * MIB
OPTIONS: dict[str, Any] = {
    "num_generations": 4,
    "max_completion_length": 6,
    "rewards": {"like": {"type": "regex", "pattern": "e"}},
    "placement": "colocated",
}
ROUND = ["/v1/completions", "/sleep?level=2"]
UPDATE = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
WOKEN = ["/wake_up?tags=weights", *UPDATE, "/reset_prefix_cache", "/wake_up?tags=kv_cache"]


def config_of(**grpo: Any) -> TrainConfig:
    data = {"dataset": "problems", "sequence_length": 64}
    execution = {"ready_timeout_s": 60, "rollout_timeout_s": 60}
    return make_config("grpo", data=data, grpo={**OPTIONS, **grpo}, execution=execution)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_artifacts(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide the file of a made-up device that this process shares with the stand-in, which our code finds."""
    path = tmp_path / "device.json"
    monkeypatch.setenv("LIFECYCLE_VLLM", str(installed(tmp_path / "environment")))
    monkeypatch.setenv(DEVICE_VARIABLE, str(path))
    give_back_freed_memory()  # of earlier tests, which else would hide what this one takes
    Device(MEMORY, os.getpid(), resident_bytes(os.getpid())).write(path)
    return path


@pytest.fixture
def context(artifacts: dict[str, Path], tmp_path: Path) -> StageContext:
    return make_context(tmp_path / "work", artifacts, config_of())


@pytest.fixture
def sampler(context: StageContext, device: Path) -> Iterator[tuple[RolloutServer, list[str]]]:
    """Provide the sampling server of a colocated training, and its warnings; afterwards nothing of it is left."""
    config, warnings = config_of(), []
    assert config.rollouts
    host = OwnServer(context, config.rollouts, ServingConfig(dtype="float32"), config.execution, None, gpu_share=0.4)
    rollouts = RolloutServer(host, config.execution, warnings.append, sleeps=True)
    yield rollouts, warnings
    rollouts.close()
    assert not served_processes(context.scratch / "server")
    assert not (context.scratch / "server").exists()


@pytest.fixture
def weights(artifacts: dict[str, Path], tmp_path: Path) -> Callable[[int], Path]:
    def write(step: int) -> Path:
        """Write the model with other weights for each step; the server removes the folder when it has newer ones."""
        folder = tmp_path / "weights" / f"step-{step}"
        shutil.copytree(artifacts["base"] / "model", folder)
        tensors = load_file(folder / "model.safetensors")
        save_file({name: tensor + step for name, tensor in tensors.items()}, folder / "model.safetensors")
        return folder

    return write


def answered_with(rollouts: RolloutServer) -> str:
    """Return the hash of the weights with which the stand-in answers."""
    texts: list[str] = []

    def keep(_: int, __: Request, answer: Answer) -> None:
        texts.append(answer.choices[0].text or "")

    rollouts.ask([(0, {"prompt": [1, 2]})], keep)
    return texts[0]


def give(rollouts: RolloutServer, folder: Path) -> None:
    """Give the server weights as a training does: by memory, once it runs."""
    rollouts.take_held(HeldWeights.gather(load_file(folder / "model.safetensors").items()))


def with_fault(device: Path, **faults: str) -> None:
    state = Device.read(device)
    state.faults = faults
    state.write(device)


def test_it_holds_no_memory_while_the_model_learns(
    sampler: tuple[RolloutServer, list[str]], weights: Callable[[int], Path], device: Path
) -> None:
    """Between the rounds the trainer may have the memory that the server needs, and only then."""
    rollouts, warnings = sampler
    for step in (1, 2):
        folder = weights(step)
        (rollouts.take if step == 1 else partial(give, rollouts))(folder)
        assert answered_with(rollouts) == StandIn.version_in(folder)
        rollouts.rest()
        assert Device.read(device).asked[-1] == ("/sleep?level=2", 0)
        gradients = torch.ones(MEMORY // 4 * 3 // 4)
        assert Device.read(device).free < KV_CACHE_BYTES, "the server could not have kept its memory"
        del gradients
    (command,), asked = Device.read(device).commands, Device.read(device).asked
    assert [url for url, _ in asked] == ["/init_weight_transfer_engine", *ROUND, *WOKEN, *ROUND]
    num_bytes = StandIn.weight_bytes(folder)
    assert [held for _, held in asked[3:9]] == [*[num_bytes] * 5, num_bytes + KV_CACHE_BYTES]
    assert command[command.index("--gpu-memory-utilization") + 1] == "0.40"
    assert "--enable-sleep-mode" in command
    assert warnings == []


def test_two_copies_are_one_server(
    sampler: tuple[RolloutServer, list[str]],
    weights: Callable[[int], Path],
    device: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside two training processes there are two copies, by vLLM's data parallelism behind one address."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    sampler[0].take(weights(1))
    (command,) = Device.read(device).commands
    assert command[command.index("--data-parallel-size") :][:4] == [
        *("--data-parallel-size", "2"),
        *("--api-server-count", "1"),
    ]


def test_memory_that_training_keeps_is_an_error(
    sampler: tuple[RolloutServer, list[str]], weights: Callable[[int], Path], device: Path
) -> None:
    rollouts, warnings = sampler
    rollouts.take(weights(1))
    rollouts.rest()
    gradients = torch.ones(MEMORY // 4 * 3 // 4)
    with pytest.raises(ServerError, match=r"CUDA out of memory: kv_cache of 67108864 bytes, .* bytes are free"):
        give(rollouts, weights(2))
    assert "wake_up for its kv_cache" in warnings[0]
    assert gradients.sum() > 0


@pytest.mark.parametrize(
    ("route", "fault"),
    [("sleep", "refuse"), ("sleep", "die"), ("wake_up", "refuse"), ("wake_up", "die"), ("update_weights", "die")],
)
def test_after_a_failure_a_new_server_has_the_newest_weights(
    sampler: tuple[RolloutServer, list[str]], weights: Callable[[int], Path], device: Path, route: str, fault: str
) -> None:
    """A server that fails asleep, falling asleep, waking up or amid new weights is replaced; its memory is free."""
    rollouts, warnings = sampler
    rollouts.take(weights(1))
    with_fault(device, **{route: fault})
    if route == "sleep":
        rollouts.rest()
        gradients = torch.ones(MEMORY // 4 * 3 // 4)
        del gradients
    else:
        rollouts.rest()
    newer = weights(2)
    give(rollouts, newer)
    assert answered_with(rollouts) == StandIn.version_in(newer)
    with_fault(device)
    rollouts.rest()
    assert len(Device.read(device).commands) == 2
    assert len(warnings) == 1
    assert route in warnings[0]


def test_a_server_that_never_sleeps_ends_the_training_for_now(
    sampler: tuple[RolloutServer, list[str]], weights: Callable[[int], Path], device: Path
) -> None:
    rollouts, _ = sampler
    with_fault(device, sleep="refuse")
    with pytest.raises(TransientError, match=rf"failed {MOST_RESTARTS + 1} times in a row: .*asking vLLM to sleep"):
        for step in range(1, MOST_RESTARTS + 2):
            (rollouts.take if step == 1 else partial(give, rollouts))(weights(step))
            answered_with(rollouts)
            rollouts.rest()


def test_where_it_samples_is_no_part_of_the_version() -> None:
    separate, colocated = config_of(placement="separate"), config_of(data_parallel_size=1)
    assert separate.identity() == colocated.identity()
    assert separate.resume_identity() == colocated.resume_identity()
    assert separate.devices == 2
    assert colocated.devices == 1
    assert config_of(placement="separate", data_parallel_size=3).devices == 4


@pytest.mark.parametrize(
    ("grpo", "problem"),
    [
        ({"data_parallel_size": 2}, "the server takes 2 devices .* where 1 trains; lower these"),
        ({"serving": {"tensor_parallel_size": 2}}, "the server takes 2 devices"),
        ({"server": {"url": "http://a/v1", "served_model": "a"}}, "for a server that the stage starts"),
    ],
)
def test_what_cannot_share_devices_is_named(grpo: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        config_of(**grpo)


def test_it_sees_the_gpus_that_it_shares() -> None:
    """Two of four visible GPUs train; a colocated server of one copy takes the first, a separate one the others."""
    environment = {"GPUS": "4,5,6,7", "LOCAL_WORLD_SIZE": "2"}
    assert gpus_beside_training("GPUS", environment, 4, 1, shared=True) == {"GPUS": "4"}
    assert gpus_beside_training("GPUS", environment, 4, 2, shared=False) == {"GPUS": "6,7"}
    options = config_of().rollouts
    assert options
    assert options.copies(num_training_here(environment)) == 2
