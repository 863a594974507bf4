"""Benchmark of data preparation: rows/s and memory of tokenizing and packing 100,000 and 1,000,000 short chats.

`python tests/benchmarks/data_streaming.py [NUM_ROWS …]` prints rows/s and peak memory for each number of rows, each in
a process of its own; memory is flat when the last lines show about the same.
"""

import json
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from stages.data.config import DataConfig
from stages.data.prepare import prepare
from stages.hubs.builtin import qwen3
from stages.models.facts import ModelFacts

DEFAULT_NUM_ROWS = (100_000, 1_000_000)


class Silent:
    """Progress reporter that discards all reports, so that the benchmark prints only its results."""

    def progress(self, done: float, total: float, unit: str, message: str = "") -> None:
        pass

    def warn(self, message: str) -> None:
        pass


def write_chats(path: Path, num_rows: int) -> None:
    """Write a JSONL file of short, distinct chats."""
    draw = random.Random(0)
    with path.open("w") as stream:
        for number in range(num_rows):
            question = f"What is {draw.randrange(10**4)} + {number}?"
            answer = str(draw.randrange(10 ** draw.randrange(1, 30)))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            stream.write(json.dumps({"messages": messages}) + "\n")


def measure(folder: Path, tokenizer_folder: Path, num_rows: int) -> None:
    """Tokenize and pack the chats in `folder` once, and print rows/s and this process's peak memory."""
    before_mib = peak_memory_mib()
    config = DataConfig(dataset="chats", sequence_length=1024)
    begin_s = time.perf_counter()
    data = prepare(
        folder / "data",
        config,
        ModelFacts(tokenizer_folder),
        rows="examples",
        cache=folder / "cache",
        report=Silent(),
        bad_rows_file=folder / "bad_rows.jsonl",
    )
    seconds = time.perf_counter() - begin_s
    peak_mib = peak_memory_mib()
    print(
        f"{num_rows:>9,} rows: {num_rows / seconds:>8,.0f} rows/s, "
        f"{data.training.num_tokens / seconds:>10,.0f} tokens/s, "
        f"peak {peak_mib:,.0f} MiB ({peak_mib - before_mib:,.0f} MiB above the imports), "
        f"padding {data.training.padding_fraction:.4f}",
        flush=True,
    )


def peak_memory_mib() -> float:
    """Return the peak memory of this process so far in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure data preparation for every number of rows named on the command line."""
    numbers = [int(argument) for argument in sys.argv[1:]] or DEFAULT_NUM_ROWS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        qwen3.make_tokenizer().save_pretrained(folder / "model")
        for num_rows in numbers:
            (folder / "data").mkdir(exist_ok=True)
            write_chats(folder / "data" / "train.jsonl", num_rows)
            process = multiprocessing.get_context("spawn").Process(
                target=measure, args=(folder, folder / "model", num_rows)
            )
            process.start()
            process.join()


if __name__ == "__main__":
    main()
