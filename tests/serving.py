"""Helpers for tests of the serve and evaluate stages: a tiny model, evaluation tasks, and stage processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stages.core.contract import StageResult
from stages.core.process_tree import marked_processes, send

API_KEY = "sk-of-the-tests"
SERVING = {"dtype": "float32", "max_model_len": 256, "enforce_eager": True, "kv_cache_memory_gib": 0.0625}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_model(folder: Path, seed: int = 0, head_dim: int = 32) -> None:
    """Write a tiny Qwen3 of single-character tokens whose large weights make one clearly likeliest: engines agree."""
    import torch
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    symbols = ["<pad>", "<eos>", "<unk>", "\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(BPE({symbol: index for index, symbol in enumerate(symbols)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def write_tasks(folder: Path, num_generations: int = 120, num_choices: int = 12) -> None:
    """Write three lm-eval tasks: `sums` generates, `choices` compares likelihoods, `long` overflows the context."""
    folder.mkdir()
    sums = ({"question": f"What is {a} + {a + 3}?", "answer": str(2 * a + 3)} for a in range(num_generations))
    choices = (
        {"question": f"Is {a} odd?", "choices": ["yes", "no", "never"], "answer": 1 - a % 2} for a in range(num_choices)
    )
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    (folder / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in choices))
    (folder / "long.jsonl").write_text("".join(json.dumps({"text": "a" * length}) + "\n" for length in (9, 400)))
    common = "dataset_path: json\ntest_split: test\nmetadata: {version: 1.0}\n"
    (folder / "sums.yaml").write_text(
        f"{common}task: sums\ndataset_kwargs: {{data_files: {{test: sums.jsonl}}}}\noutput_type: generate_until\n"
        'doc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    (folder / "long.yaml").write_text(
        f"{common}task: long\ndataset_kwargs: {{data_files: {{test: long.jsonl}}}}\noutput_type: generate_until\n"
        'doc_to_text: "{{text}}"\ndoc_to_target: b\ngeneration_kwargs: {until: ["\\n"], max_gen_toks: 4}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    (folder / "choices.yaml").write_text(
        f"{common}task: choices\ndataset_kwargs: {{data_files: {{test: ./choices.jsonl}}}}\n"
        'output_type: multiple_choice\ndoc_to_text: "Q: {{question}}\\nA:"\ndoc_to_choice: "{{choices}}"\n'
        "doc_to_target: answer\nmetric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )


def write_work(work: Path, kind: str, config: dict[str, Any], inputs: dict[str, Path], **more: Any) -> Path:
    """Make a stage's work folder, named like its kind; intermediate results in an existing one are kept."""
    work.mkdir(exist_ok=True)
    stage_input = {"name": kind, "kind": kind, "version": "0123456789ab", "config": {"kind": kind, **config}, **more}
    stage_input |= {"inputs": {name: str(path) for name, path in inputs.items()}, "cache": str(work.parent / "cache")}
    (work / "config.json").write_text(json.dumps(stage_input))
    for name in ("result.json", "error.json"):
        (work / name).unlink(missing_ok=True)
    return work


@contextmanager
def stage_process(work: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a stage's process, and kill it when the `with` block ends."""
    with (work / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "stages", str(work)],
            env={**os.environ, "VLLM_API_KEY": API_KEY},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run_to_the_end(work: Path, timeout_s: float = 500) -> StageResult:
    """Run a stage that must succeed, and return its result."""
    with stage_process(work) as process:
        assert process.wait(timeout_s) == 0, (work / "log.txt").read_text()[-3000:]
    return StageResult.model_validate_json((work / "result.json").read_text())


def wait_for(condition: Any, timeout_s: float = 500, what: str = "it") -> Any:
    """Wait until a condition is true, and return its value; fail with `what` after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.05)
    return value


def served_processes(folder: Path) -> list[int]:
    """Return the process ids of a server whose TMPDIR is `folder`: vLLM, its engine, and helpers."""
    return marked_processes(f"TMPDIR={folder}")


def engine_processes(folder: Path) -> list[int]:
    """Return the processes of a server with TMPDIR `folder`, except Python's resource tracker.

    The tracker outlives a kill until it has removed the semaphores that the others left.
    """
    commands = {}
    for pid in served_processes(folder):
        with suppress(OSError):  # it has ended since
            commands[pid] = Path(f"/proc/{pid}/cmdline").read_text()
    return [pid for pid, command in commands.items() if "resource_tracker" not in command]


def is_port_free(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) != 0


def kill(pids: list[int]) -> None:
    """Kill processes, except those that have ended by now, as children of one may that was killed before."""
    send(signal.SIGKILL, pids)
