"""Benchmark of data preparation: chats/s from a file to packed tokens, our stage against TRL's `datasets.map`.

`python tests/benchmarks/tokenizing_against_trl.py [--rows N] [--processes N] [--rounds N]`: same rows, tokenizer,
template, packed length and number of processes, nothing cached, alternating, each in a process of its own. Of TRL the
time is that of `load_dataset` and `SFTTrainer`. Both have prepared ten rows before, so that imports are not counted.
Ours hashes the file and checks every row besides.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

SEQUENCE_LENGTH = 1024
FEW_ROWS = 10
TEXT = "the harbour was quiet in the morning and the boats had not yet left for the open sea when rain began to fall"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--of",
        choices=("ours", "trl"),
        help="measure only `ours` or `trl`, once, in this process (default: both in turn)",
    )
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.of:
        measured = ours_s if arguments.of == "ours" else trl_s
        _, seconds = (measured(arguments.folder, part, arguments.processes) for part in ("few", "all"))
        print(json.dumps({"seconds": seconds}))
        return
    with tempfile.TemporaryDirectory(prefix="tokenizing-") as name:
        folder = Path(name)
        write(folder, arguments.rows)
        ratios = [one_round(folder, number, arguments) for number in range(arguments.rounds)]
    print(f"median: {statistics.median(ratios):.2f} times TRL's rows/s")


def write(folder: Path, num_rows: int) -> None:
    """Write chat rows (the first few also to a second folder), and a model with its tokenizer."""
    from stages.hubs.builtin import qwen3

    qwen3.make(folder / "model")
    draw = random.Random(0)
    for part in ("all", "few"):
        (folder / part).mkdir()
    with (folder / "all/train.jsonl").open("w") as rows, (folder / "few/train.jsonl").open("w") as few:
        for number in range(num_rows):
            question, answer = (" ".join(draw.choices(TEXT.split(), k=60)) for _ in range(2))
            messages = [
                {"role": "user", "content": f"{number}: {question}"},
                {"role": "assistant", "content": answer},
            ]
            line = json.dumps({"messages": messages}) + "\n"
            rows.write(line)
            few.write(line if number < FEW_ROWS else "")


def one_round(folder: Path, number: int, arguments: argparse.Namespace) -> float:
    """Measure our preparation and TRL's once each, print their rows/s, and return the ratio of ours to TRL's."""
    from flows.launch.local import threads

    seconds = {}
    for of in ("ours", "trl") if number % 2 else ("trl", "ours"):
        command = [sys.executable, __file__, "--of", of, "--folder", folder, "--processes", str(arguments.processes)]
        environment = {**os.environ, **threads(arguments.processes)}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        seconds[of] = json.loads(done.stdout.splitlines()[-1])["seconds"]
    rates = {of: arguments.rows / taken for of, taken in seconds.items()}
    print(
        f"ours {rates['ours']:,.0f} rows/s, TRL {rates['trl']:,.0f} rows/s, {arguments.processes} processes", flush=True
    )
    return rates["ours"] / rates["trl"]


def ours_s(folder: Path, part: str, _: int) -> float:
    """Return the seconds of our data preparation without a cache, on as many processes as OMP_NUM_THREADS allows."""
    from stages.data.config import DataConfig
    from stages.data.look import NullReporter
    from stages.data.prepare import prepare
    from stages.models.facts import ModelFacts

    config = DataConfig(dataset="chats", sequence_length=SEQUENCE_LENGTH)
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        begin_s = time.perf_counter()
        prepare(
            folder / part,
            config,
            ModelFacts(folder / "model"),
            rows="examples",
            cache=Path(cache),
            report=NullReporter(),
            bad_rows_file=folder / "bad_rows.jsonl",
        )
        return time.perf_counter() - begin_s


def trl_s(folder: Path, part: str, processes: int) -> float:
    """Return the seconds that TRL's trainer takes to tokenize and pack the benchmark's chats."""
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    settings = SFTConfig(
        output_dir=str(folder / "trl"),
        max_length=SEQUENCE_LENGTH,
        packing=True,
        dataset_num_proc=processes,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
    )
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        begin_s = time.perf_counter()
        rows = load_dataset("json", data_files=str(folder / part / "train.jsonl"), split="train", cache_dir=cache)
        SFTTrainer(model=str(folder / "model"), args=settings, train_dataset=rows)
        return time.perf_counter() - begin_s


if __name__ == "__main__":
    main()
