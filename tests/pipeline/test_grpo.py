"""GRPO stages with a real vLLM sample from the newest weights, and lose nothing when trainer or server is killed.

One vLLM is started here as a recipe's author starts one that stages name; several of them use it, one after another.
"""

import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from stages.core.contract import StageResult
from stages.core.errors import ServerError, TrainingError
from stages.core.supervised import SupervisedProcess
from stages.data.files import portions
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.rollouts.documents import checked_prompts
from stages.kinds.train.rollouts.rounds import Round
from stages.kinds.train.rollouts.server import ExternalServer, external_server_problems
from stages.kinds.train.run import run
from stages.models.facts import ModelFacts
from stages.models.recorded import read_record
from stages.serving.client import Client
from stages.serving.config import ServingConfig
from stages.serving.engine import LaunchSpec
from stages.serving.vllm.engine import find_vllm
from stages.serving.vllm.swap import START, prepare_reloads
from stages.serving.vllm.transfers.memory import MemoryConnection
from tests.serving import engine_processes, kill, served_processes, wait_for
from tests.slurm_cluster import free_ports
from tests.train_stage import (
    finish_again,
    logged,
    make_artifacts,
    make_config,
    make_context,
    make_teacher,
    run_to_end,
    start,
)

OPTIONS: dict[str, Any] = {
    "num_generations": 4,
    "num_iterations": 2,
    "max_completion_length": 6,
    "rewards": {"like": {"type": "regex", "pattern": "e"}},
    "serving": {"enforce_eager": True, "kv_cache_memory_gib": 0.0625},
}
TEXTS = {"dataset": "problems", "sequence_length": 64}
UNSERVED: dict[str, Any] = {name: value for name, value in OPTIONS.items() if name != "serving"}
SERVING = ServingConfig(dtype="float32", enforce_eager=True)
KEY = "sk-of-a-named-server"
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_PROMPTS = 8
NUM_STEPS = 30


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_artifacts(tmp_path_factory.mktemp("artifacts"))


def make(steps: int, **changed: Any) -> TrainConfig:
    fields = {"data": TEXTS, "grpo": OPTIONS, "execution": {"checkpoint_every_steps": 2}, **changed}
    num_completions = NUM_PROMPTS * OPTIONS["num_generations"]
    return make_config("grpo", steps=steps, global_batch_size=num_completions, schedule="constant", **fields)


def asked(work: Path) -> dict[int, set[str]]:
    """Return the dataset rows whose prompts the GRPO stage sent to its vLLM server, by training step."""
    rows: dict[int, set[str]] = {}
    for line in (work / "completions.jsonl").read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            continue  # torn by the kill
        sample = json.loads(line)
        rows.setdefault(sample["step"], set()).add(sample["row"])
    return rows


def test_kills_of_trainer_and_server_lose_nothing(artifacts: dict[str, Path], tmp_path: Path) -> None:
    """GRPO resumes without loss after kills of the trainer (second round) and its vLLM (before the last round)."""
    config = make(NUM_STEPS, grpo={**OPTIONS, "placement": "colocated"})
    work = make_context(tmp_path / "work", artifacts, config).work
    runtime = work / "scratch" / "server"
    attempt = start(work, config)
    checkpoints = work / "scratch" / "checkpoints"
    wait_for(lambda: attempt.poll() is not None or list(checkpoints.glob("step-*")), what="a checkpoint")
    attempt.send_signal(signal.SIGKILL)
    attempt.wait()
    wait_for(lambda: not served_processes(runtime), what="the end of the server whose trainer was killed")
    before, num_logged = asked(work), len(logged(work))
    assert num_logged < NUM_STEPS - 10, "or nothing is left to be done again"

    attempt = start(work, config)
    wait_for(lambda: attempt.poll() is not None or len(logged(work)) >= num_logged + 5, what="another round")
    kill(engine_processes(runtime))
    assert attempt.wait(500) == 0, (work / "log.txt").read_text()[-3000:]
    rows = logged(work)
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert all(len(found) == 4 for found in asked(work).values()), "a step that is done again asks the same prompts"
    assert asked(work).items() >= before.items()
    events = (work / "events.jsonl").read_text()
    assert "continuing from the checkpoint of step" in events
    assert "started again, with the same weights" in events
    assert max(row["mismatch_mean"] for row in rows) < 1e-4
    assert [row["staleness_steps"] for row in rows] == [0, 1] * (NUM_STEPS // 2)
    assert not served_processes(runtime)
    assert len(list((work / "scratch" / "weights").iterdir())) == 1, "from which the last attempt's server started"
    _check_record(work / "model", work)
    assert StageResult.model_validate_json((work / "result.json").read_text()).files[-1] == "completions.jsonl"


@pytest.mark.nightly
def test_on_two_processes_each_round_is_sampled_by_a_new_adapter(artifacts: dict[str, Path], tmp_path: Path) -> None:
    """GRPO on two processes samples each round with a new adapter, from a server that sleeps between the rounds.

    A vLLM for CPUs keeps its memory while it sleeps; tests/unit/stages/kinds/train/rollouts/test_sleep.py has one that
    frees it, by which `make test` covers this, and by `test_serve_adapters.py`, where a vLLM answers with adapters.
    """
    layout = {"dp_shard": 2, "micro_batch_size": 2}
    options = {**OPTIONS, "placement": "colocated", "data_parallel_size": 1}
    config = make(4, learning_rate=1e-2, adapter={"rank": 4}, layout=layout, grpo=options)
    work = make_context(tmp_path / "work", artifacts, config).work
    _check_rounds(config, work)
    _check_slept(work, num_rounds=2)


@pytest.mark.nightly
def test_two_copies_of_the_model_sample_and_both_get_new_weights(artifacts: dict[str, Path], tmp_path: Path) -> None:
    """vLLM's data parallelism: of two copies each answers some prompts, with the newest weights, after both slept.

    `make test` covers the life cycle of one copy, and the command line (`test_sleep.py`).
    """
    options = {**OPTIONS, "placement": "colocated", "data_parallel_size": 2}
    config = make(4, learning_rate=1e-2, layout={"dp_shard": 2, "micro_batch_size": 2}, grpo=options)
    work = make_context(tmp_path / "work", artifacts, config).work
    _check_rounds(config, work)
    _check_slept(work, num_rounds=2)


def _check_slept(work: Path, num_rounds: int) -> None:
    """Check by the log of a vLLM that it slept after every round, and woke up in two parts for all but the first."""
    log = (work / "server.log").read_text()
    assert log.count('"POST /sleep?level=') == num_rounds
    for part in ("weights", "kv_cache"):
        assert log.count(f'"POST /wake_up?tags={part} ') == num_rounds - 1


@pytest.mark.nightly
def test_on_two_processes_of_megatron_each_round_is_sampled_by_new_weights(
    artifacts: dict[str, Path], named_server: dict[str, str], tmp_path: Path
) -> None:
    """GRPO on two processes of Megatron samples each round, from the shared vLLM, with new weights.

    `make test` covers this by `test_kills_of_trainer_and_server_lose_nothing`, and by
    `tests/parity/test_megatron_weights.py`, which exports what Megatron trained.
    """
    options = {**UNSERVED, "server": named_server}
    layout = {"tp": 2, "micro_batch_size": 2}
    config = make(4, learning_rate=1e-2, engine="megatron", layout=layout, grpo=options)
    _check_rounds(config, make_context(tmp_path / "work", artifacts, config).work)


@pytest.fixture(scope="module")
def mixture(artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Provide the artifacts with a tiny mixture of experts as `base`, which has the same tokenizer."""
    folder = tmp_path_factory.mktemp("mixture")
    shutil.copytree(artifacts["base"] / "model", folder / "model")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{"vocab_size": 288, "hidden_size": 64, "num_hidden_layers": 2, "initializer_range": 0.2, "head_dim": 32},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
        **{"eos_token_id": read_end(folder / "model"), "bos_token_id": None, "dtype": "float32"},
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "model")
    return {**artifacts, "base": folder}


def read_end(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["eos_token_id"])


@pytest.mark.nightly
def test_experts_of_the_old_policy_are_replayed_in_a_stage(mixture: dict[str, Path], tmp_path: Path) -> None:
    """A mixture's rounds replay the old policy's experts: in the first update of each, π/π_old is 1 to the bit.

    With bounds of 1 and 1 on the ratio, each other ratio that is worth less is counted as clipped. `make test` covers
    both engines by `test_expert_choices.py`.
    """
    bounds = {"epsilon": 0.0, "epsilon_high": 0.0, "replay_experts": True}
    config = make(4, learning_rate=1e-2, grpo={**OPTIONS, **bounds})
    work = make_context(tmp_path / "work", mixture, config).work
    run_to_end(work, config)
    clipped = [row["clipped_low_fraction"] + row["clipped_high_fraction"] for row in logged(work)]
    assert clipped[::2] == [0.0, 0.0], "the round's first update"
    assert min(clipped[1::2]) > 0.1, "the weights are others by then"
    assert max(row["mismatch_mean"] for row in logged(work)) < 1e-4, "the server had the new weights"
    before, after = (load_file(folder / "model" / "model.safetensors") for folder in (mixture["base"], work))
    routers = [name for name in before if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2 and not any(torch.equal(before[name], after[name]) for name in routers)


def _check_rounds(config: TrainConfig, work: Path) -> None:
    """Train with GRPO, and check that the server's log-probabilities of its samples equal the engine's."""
    run_to_end(work, config)
    rows = logged(work)
    assert max(row["mismatch_mean"] for row in rows) < 1e-4
    assert max(row["clipped_low_fraction"] for row in rows) > 0, "or the second weights were the first ones again"
    assert list((work / config.product).glob("*.safetensors"))


@pytest.fixture(scope="module")
def named_server(artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with named_vllm(artifacts["base"] / "model", tmp_path_factory.mktemp("named"), "--max-model-len", "64") as server:
        yield server


@contextmanager
def named_vllm(model: Path, folder: Path, *options: str, swaps_adapters: bool = False) -> Iterator[dict[str, str]]:
    """Start a vLLM as our error message says. Its head is written out: on a CPU, tied ones stay old."""
    shutil.copytree(model, folder / "model")
    prepare_reloads(folder / "model")
    program = find_vllm()
    spec = LaunchSpec(
        **{"model": folder / "model", "served_name": "learner", "serving": SERVING, "engine_version": "any"},
        for_training=True,
        swaps_adapters=swaps_adapters,
    )
    (variable, value), _, *said = (part.split("=") if "=" in part else part for part in shlex.split(START))
    environment = {**program.server_environment(spec, KEY), "TMPDIR": str(folder), variable: value}
    (port,) = free_ports(1)
    command = [program.command, *(str(spec.model) if part == "MODEL" else part for part in said)]
    command += ["--served-model-name", "learner", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += [*options, "--enforce-eager", "--kv-cache-memory-bytes", str(2**26)]
    with (folder / "log.txt").open("wb") as log:
        server = SupervisedProcess(
            [*map(str, command), "--distributed-executor-backend", "uni"], environment=environment, output=log
        )
    client = Client(f"http://127.0.0.1:{port}", KEY, "learner")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEARNER_KEY", KEY)
        try:
            wait_for(lambda: client.is_healthy() or not server.alive(), what="a vLLM that answers")
            yield {"url": f"{client.url}/v1", "served_model": "learner", "key_variable": "LEARNER_KEY"}
            assert client.is_healthy(), "no stage ends it"
        finally:
            server.stop()


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_groups_without_signal_are_drawn_again_from_the_asked_distribution(
    artifacts: dict[str, Path], named_server: dict[str, str], tmp_path: Path, top_p: float
) -> None:
    """GRPO samples again, at the same temperature, not 1, where a prompt's completions all got the same reward.

    The reward is rarely given, so that one draw is not enough.
    """
    rare = {"rewards": {"rare": {"type": "regex", "pattern": "[02]"}}, "num_iterations": 1}
    options = {**UNSERVED, **rare, "max_draws": 3, "temperature": 0.8, "top_p": top_p, "server": named_server}
    data, often = {**TEXTS, "evaluation_split": "validation"}, {"checkpoint_every_steps": 3, "evaluate_every_steps": 2}
    config = make(3, grpo=options, data=data, execution=often)
    context = make_context(tmp_path / "work", artifacts, config)
    result = run(config, context)
    rows = logged(context.work)
    assert max(row["num_draws"] for row in rows) > 1
    for row in rows:
        assert row["num_draws"] == 3 or row["no_signal_share"] == 0, "it stopped before every group had a signal"
        assert row["num_draws"] <= 3
    if top_p == 1:
        assert max(row["mismatch_mean"] for row in rows) < 1e-4, "of both at the temperature"
    assert not (context.work / "server.log").exists()
    first = Round.read(context.work / "scratch" / "rollouts" / "step-1.json")
    assert len(first.groups) == NUM_PROMPTS
    signals = [group.has_signal for group in first.groups]
    assert signals == sorted(signals, reverse=True), "those that teach something come first"
    assert 1 - sum(signals) / NUM_PROMPTS == pytest.approx(rows[0]["no_signal_share"])
    _check_sampled(artifacts, config, first, artifacts["base"] / "model")
    _check_held_out(artifacts, config, context.work, result)


@pytest.mark.nightly
def test_a_server_of_two_that_hangs_takes_no_prompt_with_it(
    artifacts: dict[str, Path], named_server: dict[str, str], tmp_path: Path
) -> None:
    """One of two vLLMs stops amid the training, and the other answers its prompts; later it goes on, with new weights.

    `make test` covers deaths by a stand-in (`test_named_server.py`).
    """
    with named_vllm(artifacts["base"] / "model", tmp_path / "other", "--max-model-len", "64") as other:
        options = {**UNSERVED, "server": {**named_server, "other_urls": [other["url"]]}}
        often = {"checkpoint_every_steps": 10, "rollout_timeout_s": 10}
        config = make(60, grpo=options, execution=often)
        work = make_context(tmp_path / "work", artifacts, config).work
        attempt, stopped = start(work, config), engine_processes(tmp_path / "other")
        assert stopped
        (work / "metrics.jsonl").touch()
        for num_steps, what in ((4, signal.SIGSTOP), (16, signal.SIGCONT)):
            wait_for(lambda: attempt.poll() is not None or len(logged(work)) >= num_steps, what="some rounds")  # noqa: B023
            for pid in stopped:
                os.kill(pid, what)
        assert attempt.wait(500) == 0, (work / "log.txt").read_text()[-3000:]
    assert all(len(found) == 4 for found in asked(work).values())
    assert [row["step"] for row in logged(work)] == list(range(1, 61))
    assert max(row["mismatch_mean"] for row in logged(work)) < 1e-4, "no weights are older ones"
    events = (work / "events.jsonl").read_text()
    # It stops after a step, so most often when it is given weights; amid a round the words are others.
    assert re.search(rf"{other['url'].removesuffix('/v1')}, is left out of (this|the next) round", events)
    log = (tmp_path / "other" / "log.txt").read_text()
    assert log.count("collective_rpc") > 6, "it had weights again"


@pytest.mark.nightly
def test_a_named_server_samples_each_round_with_a_new_adapter(artifacts: dict[str, Path], tmp_path: Path) -> None:
    """A killed run that learns an adapter goes on with a vLLM that others started, where no adapter is left behind.

    `make test` covers the requests by a stand-in (`test_named_server.py`).
    """
    room = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-target-modules", *LAYERS)
    model = artifacts["base"] / "model"
    with named_vllm(model, tmp_path / "named", "--max-model-len", "64", *room, swaps_adapters=True) as server:
        options = {**UNSERVED, "server": server}
        config = make(20, learning_rate=1e-2, adapter={"rank": 4}, grpo=options)
        work = make_context(tmp_path / "work", artifacts, config).work
        attempt = start(work, config)
        checkpoints = work / "scratch" / "checkpoints"
        wait_for(lambda: attempt.poll() is not None or list(checkpoints.glob("step-*")), what="a checkpoint")
        attempt.send_signal(signal.SIGKILL)
        attempt.wait()
        client = Client(server["url"].removesuffix("/v1"), KEY, "learner")
        assert any(name.startswith("policy-") for name in client.model_names()), "what a kill leaves"
        _check_rounds(config, work)
        assert client.model_names() == ["learner"]
    log = (tmp_path / "named" / "log.txt").read_text()
    assert log.count("/v1/load_lora_adapter") > 10 and log.count("collective_rpc") <= 4, "it kept its base"


@pytest.mark.nightly
@pytest.mark.parametrize("lag", [1, 2])
def test_rounds_are_sampled_a_fixed_lag_behind_those_that_are_learned(
    artifacts: dict[str, Path], named_server: dict[str, str], tmp_path: Path, lag: int
) -> None:
    """Each round is sampled by the weights that its record says, and a run that finds its rounds ends bitwise equal.

    The last round's log-probabilities are, by Transformers, those of a training that ends `lag` rounds earlier.
    `make test` covers the order (`test_rounds.py`) and synchronous rounds.
    """
    options = {**UNSERVED, "server": named_server, "asynchronous": {"lag": lag}}
    config = make(12, learning_rate=1e-2, grpo=options, execution={"checkpoint_every_steps": 12 - 2 * lag})
    work = make_context(tmp_path / "whole" / "work", artifacts, config).work
    run_to_end(work, config)
    expected = [min(step - 1, 2 * lag + (step - 1) % 2) for step in range(1, 13)]
    assert [row["staleness_steps"] for row in logged(work)] == expected
    assert [row["step"] for row in logged(work) if "mismatch_mean" in row] == [1, 2], "of equal versions alone"
    assert all(0 <= row[f"{who}_idle_share"] <= 1 for row in logged(work) for who in ("trainer", "sampler"))
    kept = {path.name: Round.read(path) for path in (work / "scratch" / "rollouts").glob("step-*.json")}
    assert {name: one.weights_step for name, one in kept.items() if one.first_step > 12 - 2 * lag} == {
        f"step-{first}.json": first - 1 - 2 * lag for first in range(13 - 2 * lag, 12, 2)
    }
    finish_again(work, 12 - 2 * lag, tmp_path / "again" / "work", artifacts, config)
    weights = [load_file(one / "model" / "model.safetensors") for one in (work, tmp_path / "again" / "work")]
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())
    few = config.model_copy(update={"steps": 10 - 2 * lag})
    shorter = make_context(tmp_path / "shorter" / "work", artifacts, few).work
    run_to_end(shorter, few)
    _check_sampled(artifacts, config, kept["step-11.json"], shorter / "model")
    with pytest.raises(AssertionError):
        _check_sampled(artifacts, config, kept["step-11.json"], work / "model")


@pytest.mark.nightly
def test_a_kill_in_any_phase_changes_no_overlapped_round(
    artifacts: dict[str, Path], named_server: dict[str, str], tmp_path: Path
) -> None:
    """Killed before the first step, and later amid sampling, learning and checkpoints, a run does the same rounds."""
    options = {**UNSERVED, "server": named_server, "asynchronous": {"lag": 1}}
    config = make(24, grpo=options, execution={"checkpoint_every_steps": 4})
    whole, killed = (make_context(tmp_path / name / "work", artifacts, config).work for name in ("whole", "killed"))
    run_to_end(whole, config)
    rounds, checkpoints = killed / "scratch" / "rollouts", killed / "scratch" / "checkpoints"
    (killed / "metrics.jsonl").touch()  # which a stage makes with its first step
    phases: list[Callable[[], object]] = [
        lambda: (rounds / "step-1.json").exists(),
        lambda: (rounds / "step-3.json").exists(),
        lambda: len(logged(killed)) >= 2,
        lambda: list(checkpoints.glob("*4*")),
        lambda: (rounds / "step-9.json").exists(),
        lambda: len(logged(killed)) >= 11,
    ]
    for reached in phases:
        attempt = start(killed, config)
        wait_for(lambda: attempt.poll() is not None or reached(), what="a phase")  # noqa: B023
        attempt.send_signal(signal.SIGKILL)
        attempt.wait()
    run_to_end(killed, config)
    assert asked(killed) == asked(whole), "the same prompts"
    versions = [[row["staleness_steps"] for row in logged(work)] for work in (killed, whole)]
    assert versions[0] == versions[1]
    shown = [(work / "completions.jsonl").read_text().splitlines() for work in (killed, whole)]
    texts = [[json.loads(line)["text"] for line in lines[:64]] for lines in shown]
    assert texts[0] == texts[1], "the first rounds, of equal weights, have equal seeds"
    assert "were not kept" not in (killed / "events.jsonl").read_text()


def _check_held_out(artifacts: dict[str, Path], config: TrainConfig, work: Path, result: StageResult) -> None:
    """Check that the prompts that are not trained on are answered after step 2 and at the end, and count in nothing."""
    model = ModelFacts(artifacts["base"] / "model")
    trained, held_out = (
        {str(one.place) for one in checked_prompts(config, artifacts, model, portion=portion)}
        for portion in portions(config.data)
    )
    assert set().union(*asked(work).values()) <= trained
    assert [result.metrics[name] for name in ("num_prompts", "num_held_out_prompts")] == [len(trained), len(held_out)]
    last = Round.read(work / "scratch" / "rollouts" / "evaluation.json")
    assert [group.prompt for group in last.groups] == list(range(len(held_out)))
    shares = [float(bool(re.search("[02]", one.text))) for one in last.completions]
    assert result.metrics["evaluation_reward"] == pytest.approx(sum(shares) / len(held_out))
    assert result.metrics["evaluation_reward_rare"] == -result.metrics["evaluation_loss"]
    assert ["evaluation_reward" in row for row in logged(work)] == [False, True, False], "then at the end"


def test_a_named_server_is_refused_where_it_does_not_do(
    artifacts: dict[str, Path], named_server: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GRPO rejects a named vLLM whose context is too short, or that sees another weights folder (/proc/self/cwd)."""
    config = make(2, data={**TEXTS, "sequence_length": 128}, grpo={**UNSERVED, "server": named_server})
    (problem,) = external_server_problems(config, ModelFacts(artifacts["base"] / "model"))
    assert "takes 64 tokens of prompt and completion together, where there may be 128" in str(problem)
    (named,) = ExternalServer.all_of(
        make(2, grpo={**UNSERVED, "server": named_server}), ModelFacts(artifacts["base"] / "model")
    )
    named.check(tmp_path / "seen")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ServerError, match="must have the same one under the same path"):
        named.engine.check_reads(named.address, named.api_key, Path("/proc/self/cwd/unseen"), 60)
    named.check(tmp_path / "seen")


def test_answers_that_a_teacher_is_asked_about_are_the_same_after_a_kill(
    artifacts: dict[str, Path], named_server: dict[str, str], tmp_path: Path
) -> None:
    """Killed on-policy distillation resumes to bitwise the same weights; the server at first has another stage's."""
    inputs = {**artifacts, "teacher": make_teacher(artifacts, tmp_path / "teacher")}
    sampling = {"max_completion_length": 8, "server": named_server}
    distill = {"loss_top_k": 8, "lmbda": 0.75, "sampling": sampling}
    config = make_config(
        "distill",
        data=TEXTS,
        teacher="teacher",
        distill=distill,
        steps=12,
        learning_rate=1e-2,
        execution={"checkpoint_every_steps": 2},
    )
    works = [make_context(tmp_path / name / "work", inputs, config).work for name in ("killed", "whole")]
    checkpoints = works[0] / "scratch" / "checkpoints"
    for _ in range(5):  # on a busy machine it may have ended before it is killed
        shutil.rmtree(works[0].parent)
        make_context(works[0], inputs, config)
        attempt = start(works[0], config)
        wait_for(lambda: attempt.poll() is not None or list(checkpoints.glob("step-*")), what="a checkpoint")  # noqa: B023
        attempt.send_signal(signal.SIGKILL)
        attempt.wait()
        if len(logged(works[0])) < 10:
            break
    assert 2 <= len(logged(works[0])) < 10, "or nothing is left to be done"
    for work in works:
        run_to_end(work, config)
    assert "continuing from the checkpoint of step" in (works[0] / "events.jsonl").read_text()
    assert {row["on_policy"] for row in logged(works[1])} == {0.0, 1.0}
    shown = [(work / "completions.jsonl").read_text().splitlines() for work in works]
    assert shown[0] == shown[1], "a step that is done again shows the same prompts and answers, once"
    weights = [load_file(work / "model" / "model.safetensors") for work in works]
    untrained = load_file(artifacts["base"] / "model" / "model.safetensors")
    for name, values in weights[1].items():
        assert torch.equal(weights[0][name], values), name
        assert not torch.equal(untrained[name], values), "nothing was learned"


def _check_sampled(artifacts: dict[str, Path], config: TrainConfig, sampled: Round, folder: Path) -> None:
    """Check with Transformers that sampled tokens are within `top_p` and the server's log-probabilities are right."""
    assert config.rollouts
    top_p = config.rollouts.top_p
    prompts = checked_prompts(config, artifacts, ModelFacts(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for group in sampled.groups:
        prompt = prompts[group.prompt].token_ids
        for completion in group.completions:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
            shares, order = (logits / config.rollouts.temperature).softmax(-1).sort(descending=True)
            before = shares.cumsum(-1) - shares  # what likelier tokens have together
            kept = shares.where(before < top_p, 0.0)
            kept = kept / kept.sum(-1, keepdim=True)
            places = (order == torch.tensor(completion.token_ids)[:, None]).nonzero()[:, 1]
            given = before.gather(1, places[:, None])
            assert (given < top_p + 1e-4).all(), "no token is beyond the likeliest ones"
            is_sure = (given < top_p - 1e-4).squeeze(1)  # at the border, rounding decides
            values = kept.gather(1, places[:, None]).squeeze(1).log()[is_sure].tolist()
            of_server = torch.tensor(completion.log_probabilities)[is_sure].tolist()
            assert of_server == pytest.approx(values, abs=1e-3)


def test_a_server_that_keeps_its_weights_is_an_error(
    artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GRPO fails if vLLM goes on with old weights, whatever its routes answer."""
    monkeypatch.setattr(MemoryConnection, "give", lambda *_: None)
    config = make(4, learning_rate=1e-2)
    with pytest.raises(TrainingError, match=r"given the weights for step 3, the server gives .* at most 0\.001"):
        run(config, make_context(tmp_path / "work", artifacts, config))


def _check_record(folder: Path, work: Path) -> None:
    """Check that the recorded log-probabilities of the first completions are those that Transformers computes."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for one in read_record(work):
        with torch.no_grad():
            values = model(input_ids=torch.tensor([one.input_ids])).logits[0].log_softmax(-1)
        given = sum(values[place, target].item() for place, target in enumerate(one.targets) if target >= 0)
        assert given == pytest.approx(one.log_probability, abs=1e-3)
