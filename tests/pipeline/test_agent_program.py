"""An agent program leads the episodes of a GRPO stage, whose turns a real vLLM samples from the newest weights."""

import json
from pathlib import Path

import pytest
from pyarrow import parquet
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from stages.hubs.builtin import qwen3_tools
from stages.rollouts.episode_table import round_files
from tests.serving import served_processes
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


@pytest.mark.nightly
def test_a_program_leads_the_episodes_that_are_learned(tmp_path: Path) -> None:
    """`make test` covers programs with a scripted server, in `test_programs.py`."""
    artifacts = {name: tmp_path / name for name in ("base", "problems")}
    model, data = artifacts["base"] / "model", artifacts["problems"] / "data"
    for folder in (model, data):
        folder.mkdir(parents=True)
    qwen3_tools.make(model)
    rows = [{"prompt": f"What is {number} * 12?", "answer": str(number * 12)} for number in range(16)]
    (data / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tokenizer = AutoTokenizer.from_pretrained(model)
    weights = load_file(model / "model.safetensors")
    (embedding,) = (name for name in weights if "embed_tokens" in name)
    weights[embedding][tokenizer.convert_tokens_to_ids("<|im_end|>")] *= 10  # or turns would hardly ever end
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    (tmp_path / "agent.py").write_text(AGENT)
    options = {
        "num_generations": 4,
        "max_completion_length": 16,
        "serving": {"enforce_eager": True, "kv_cache_memory_gib": 0.0625},
        "environment": {"program": "python agent.py", "files": [str(tmp_path / "agent.py")], "num_together": 12},
    }
    texts = {"dataset": "problems", "sequence_length": 128}
    config = make_config("grpo", steps=4, global_batch_size=16, data=texts, grpo=options)
    work = make_context(tmp_path / "work", artifacts, config).work
    run_to_end(work, config)
    steps = logged(work)
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert max(row["mismatch_mean"] for row in steps) < 1e-4, "the trainer learns the tokens that were sampled"
    episodes = [row for file in round_files(work).values() for row in parquet.read_table(file).to_pylist()]
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
