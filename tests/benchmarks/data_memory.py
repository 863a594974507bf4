"""Benchmark of the memory and time that a training stage needs to tokenize and train on a large JSONL dataset.

`python tests/benchmarks/data_memory.py [GB …] [--linked]` prints the peak of its processes for each size, those that
tokenize apart; it is flat when the lines show about the same. No two rows are the same, so that all of them are
tokenized, hashed, packed, written and compared. With `--linked` the dataset is one shard, linked many times: what is
tokenized is kept by content, so that all of it is hashed, packed, written and compared, but tokenized once. Most words
are a token, as with a trained vocabulary. The disk needs four times the size of the largest dataset, linked thrice.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from flows.launch import local
from stages.hubs.builtin import qwen3
from tests.train_stage import make_config, make_context

DEFAULT_GB = (0.5, 2.0)
SHARD_BYTES = 100_000_000
NUM_WORDS = 5000
VOCABULARY_SIZE = 8192
WORDS_OF_ROW = 220
"""Number of words in a row of generated text, which makes about a kilobyte."""
POLL_S = 0.05
OF_TOKENIZING = b"spawn_main"
"""Text in the command line by which the benchmark recognizes tokenizing processes."""


def make_words() -> list[str]:
    """Return random words, nearly all of them distinct, from which the benchmark's texts are made."""
    draw = random.Random(0)
    return ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(1, 6))) for _ in range(NUM_WORDS)]


def make_model(folder: Path, words: list[str]) -> None:
    """Write the built-in model with a tokenizer for which most generated words are one token, their space included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [qwen3.END_OF_TEXT, qwen3.START_OF_TURN, qwen3.END_OF_TURN]
    tokenizer.train_from_iterator(
        (f" {word}" for word in words),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY_SIZE,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=qwen3.END_OF_TURN, pad_token=qwen3.END_OF_TEXT)
    fast.save_pretrained(folder)
    config = qwen3.make_model(qwen3.make_tokenizer()).config
    config.vocab_size = VOCABULARY_SIZE
    Qwen3ForCausalLM(config).save_pretrained(folder)


def base_rows(words: list[str]) -> bytes:
    """Return JSONL rows of random text that fill one shard of the dataset. The caller makes each shard distinct."""
    draw = random.Random(1)
    rows, num_bytes = [], 0
    while num_bytes < SHARD_BYTES:
        rows.append(json.dumps({"text": "# " + " ".join(draw.choices(words, k=WORDS_OF_ROW))}).encode() + b"\n")
        num_bytes += len(rows[-1])
    return b"".join(rows)


def peaks_mib(process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Return the peak memory, without page cache, of the stage's process and of its largest tokenizer, in MiB."""
    stage_kib = tokenizing_kib = 0
    while process.poll() is None:
        stage_kib = max(stage_kib, anonymous_kib(process.pid))
        tokenizing_kib = max([tokenizing_kib, *map(anonymous_kib, tokenizing(process.pid))])
        time.sleep(POLL_S)
    return stage_kib / 1024, tokenizing_kib / 1024


def tokenizing(pid: int) -> list[int]:
    """Return the ids of the tokenizing processes among a process's descendants."""
    return [child for child in children(pid) if OF_TOKENIZING in command_line(child)]


def command_line(pid: int) -> bytes:
    """Return the command line of a process; empty once the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def children(pid: int) -> list[int]:
    """Return the process ids of all descendants of a process."""
    try:
        found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return found + [below for child in found for below in children(child)]


def anonymous_kib(pid: int) -> int:
    """Return the anonymous (not file-backed) memory of a process in KiB; 0 once the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def main() -> None:
    """Measure a train stage's duration and peak memory on a dataset of each size named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes_gb", metavar="GB", type=float, nargs="*", default=DEFAULT_GB)
    parser.add_argument("--linked", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifacts = {"base": folder / "base", "texts": folder / "texts"}
        (artifacts["base"] / "model").mkdir(parents=True)
        (artifacts["texts"] / "data" / "train").mkdir(parents=True)
        words = make_words()
        make_model(artifacts["base"] / "model", words)
        rows = base_rows(words)
        data = {"dataset": "texts", "format": "text", "sequence_length": 2048}
        config = make_config(data=data, steps=3)
        for size_gb in arguments.sizes_gb:
            for shard in range(max(1, round(size_gb * 1e9 / SHARD_BYTES))):
                path = artifacts["texts"] / "data" / "train" / f"{shard:05}.jsonl"
                path.unlink(missing_ok=True)
                if shard and arguments.linked:
                    os.link(path.with_name("00000.jsonl"), path)
                else:
                    path.write_bytes(rows.replace(b"# ", b"%d " % shard))
            work = folder / f"{size_gb:g}" / "work"
            make_context(work, artifacts, config)
            begin_s = time.perf_counter()
            with (work / "log.txt").open("wb") as log:
                command, environment = local.command(work, config), local.environment(config)
                process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            stage_mib, tokenizing_mib = peaks_mib(process)
            assert process.returncode == 0, (work / "log.txt").read_text()[-4000:]
            seconds = time.perf_counter() - begin_s
            print(
                f"{size_gb:6.1f} GB: at most {stage_mib:,.0f} MiB the stage, {tokenizing_mib:,.0f} MiB a process that "
                f"tokenizes; {seconds:,.0f} s, {size_gb * 1e3 / seconds:,.1f} MB/s",
                flush=True,
            )
            shutil.rmtree(work.parent)


if __name__ == "__main__":
    main()
