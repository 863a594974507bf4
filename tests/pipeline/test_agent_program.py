"""An agent program leads the episodes of a GRPO stage, whose turns a real vLLM samples from the newest weights."""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from flows.launch import local
from stages.core.process_tree import descendants, marked_processes
from stages.hubs.builtin import qwen3_tools
from stages.kinds.train.config import TrainConfig
from stages.rollouts.episode_table import round_files
from tests.serving import served_processes, wait_for
from tests.train_stage import logged, make_config, make_context, run_to_end

AGENT = """
import json, os, sys, urllib.request

row = json.loads(sys.stdin.readline())["row"]
URL, KEY, MODEL = (os.environ[f"OPENAI_{name}"] for name in ("BASE_URL", "API_KEY", "MODEL"))
messages, text = [{"role": "user", "content": row["prompt"]}], ""
for _ in range(2):
    body = json.dumps({"model": MODEL, "messages": messages, "stream": False, "temperature": 0.01}).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{URL}/chat/completions", body, headers)
    answer = json.load(urllib.request.urlopen(request))["choices"][0]
    messages += [answer["message"], {"role": "user", "content": "Again."}]
    text += answer["message"]["content"]
    if answer["finish_reason"] == "length":
        break
print(json.dumps({"reward": sum(letter in "0123456789" for letter in text) / 10}))
"""


LINGERING = "import subprocess, time; subprocess.Popen(['sleep', '1000'], start_new_session=True); time.sleep(0.5)\n"
"""Beginning of an agent that starts a process in a session of its own, which a kill of the stage must end, too."""


def make_ending_model(folder: Path, seed: int | None = None) -> None:
    """Write an untrained model that ends its turns, as such models hardly ever do. seed: of other weights."""
    folder.mkdir(parents=True)
    qwen3_tools.make(folder)
    tokenizer, weights = AutoTokenizer.from_pretrained(folder), load_file(folder / "model.safetensors")
    if seed is not None:
        random = torch.Generator().manual_seed(seed)
        for weight in weights.values():
            weight += 0.02 * torch.randn(weight.shape, generator=random)
    (embedding,) = (name for name in weights if "embed_tokens" in name)
    weights[embedding][tokenizer.convert_tokens_to_ids("<|im_end|>")] *= 10
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def made(folder: Path, agent: str, **fields: Any) -> tuple[dict[str, Path], TrainConfig]:
    """Make a model, problems and an agent program in a folder; return them with the config of a stage that learns."""
    artifacts = {name: folder / name for name in ("base", "problems")}
    data = artifacts["problems"] / "data"
    data.mkdir(parents=True)
    make_ending_model(artifacts["base"] / "model")
    rows = [{"prompt": f"What is {number} * 12?", "answer": str(number * 12)} for number in range(16)]
    (data / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "agent.py").write_text(agent)
    options = {
        "num_generations": 4,
        "max_completion_length": 16,
        "serving": {"enforce_eager": True, "kv_cache_memory_gib": 0.0625},
        "environment": {"program": "python agent.py", "files": [str(folder / "agent.py")], "num_together": 12},
    }
    texts = {"dataset": "problems", "sequence_length": 128}
    return artifacts, make_config("grpo", steps=4, global_batch_size=16, data=texts, grpo=options, **fields)


def kept(work: Path) -> list[dict[str, Any]]:
    """Return the episodes of a stage, as it has kept them, by the step that learned from them first."""
    return [row for file in round_files(work).values() for row in parquet.read_table(file).to_pylist()]


@pytest.mark.nightly
def test_a_program_leads_the_episodes_that_are_learned(tmp_path: Path) -> None:
    """`make test` covers programs with a scripted server, in `test_programs.py`."""
    artifacts, config = made(tmp_path, AGENT)
    tokenizer = AutoTokenizer.from_pretrained(artifacts["base"] / "model")
    work = make_context(tmp_path / "work", artifacts, config).work
    run_to_end(work, config)
    steps = logged(work)
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert max(row["mismatch_mean"] for row in steps) < 1e-4, "the trainer learns the tokens that were sampled"
    episodes = kept(work)
    assert len(episodes) == 64 and {row["turns"] for row in episodes} == {1.0, 2.0}
    for row in episodes:
        authors = [segment["author"] for segment in row["segments"]]
        assert authors == (["model", "environment", "model"] if row["turns"] == 2 else ["model"])
        answered = tokenizer.decode(
            [token for segment in row["segments"] if segment["author"] == "model" for token in segment["token_ids"]],
        ).replace("<|im_end|>", "")
        assert row["reward_environment"] == sum(letter in "0123456789" for letter in answered) / 10
    assert len({row["reward_environment"] for row in episodes}) > 1
    assert not served_processes(work / "scratch" / "server")


@pytest.mark.nightly
def test_a_kill_of_the_stage_leaves_no_agent_and_the_next_asks_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer is killed while agents run. The next attempt has the same prompts and seeds, and the rounds kept."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    artifacts, config = made(tmp_path, LINGERING + AGENT, execution={"checkpoint_every_steps": 1})
    work = make_context(tmp_path / "work", artifacts, config).work
    shared, scratch = {*Path("/dev/shm").iterdir()}, work / "scratch"

    def agents() -> list[int]:
        return marked_processes(f"{scratch}/environments/")

    attempt = local.start(work, config)
    wait_for(
        lambda: not attempt.alive() or (round_files(scratch) and len(questions(agents())) > 2),
        what="agents of a later round",
    )
    assert attempt.alive(), (work / "log.txt").read_text()[-3000:]
    asked = questions(agents())
    os.kill(descendants(attempt.pid)[0], signal.SIGKILL)  # the trainer, whose supervisor ends the rest
    wait_for(lambda: not attempt.alive(), what="the end of the stage")
    wait_for(lambda: not marked_processes(str(work)), timeout_s=10, what="the end of agents and server")
    assert not [*temporary.iterdir()] and {*Path("/dev/shm").iterdir()} <= shared
    learned = {name: file.read_bytes() for name, file in round_files(scratch).items()}
    run_to_end(work, config)
    assert not [*(scratch / "environments").rglob("agents")] and not agents()
    assert learned and all(round_files(work)[name].read_bytes() == content for name, content in learned.items())
    shown = {row["seed"]: row["prompt"] for row in kept(work)}
    assert len(asked) > 2 and all(prompt in shown.get(seed, "") for prompt, seed in asked), "asked again after a kill"
    assert [row["step"] for row in logged(work)] == [1, 2, 3, 4] and len(kept(work)) == 64


def questions(pids: list[int]) -> set[tuple[str, int]]:
    """Return prompt and seed of the questions that agent programs got as their standard input."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):  # it may have ended, or be a child with another input
            question = json.loads(Path(f"/proc/{pid}/fd/0").read_text())
            found.add((question["row"]["prompt"], question["seed"]))
    return found
