"""Benchmark of one GPU: runs GPU tests, measures matmul rates and times training runs, each within three minutes.

Run: `python tests/benchmarks/gpu.py --out FOLDER`.
Parts are the tests of `tests/gpu`, the device's matmul and copy rates, and training steps (`gpu_part.py`), in the order
of what is worth most to know. Each is a process of its own with a time limit; `FOLDER/gpu.json` and `FOLDER/gpu.md` are
written after each. Started again, it goes on with what is not in `gpu.json`; `--limit-s` ends it before a command's own
limit. `lifecycle calibrate --measured FOLDER/gpu.json --out FILE` fits the planner to it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TESTS = (
    "test_kernels_on_gpu.py",
    "test_training_on_gpu.py",
    "test_methods_on_gpu.py",
    "test_energy_on_gpu.py",
    "test_megatron_on_gpu.py -k fp32",
    "test_megatron_on_gpu.py -k bf16",
)
PART_LIMIT_S = 175
CPU_LIMIT_S = 600
"""Time limit in seconds of each part of the benchmark on a CPU, where it only proves that the programs run."""
LEAST_S = 20
"""Seconds that must remain of the benchmark's time limit for another part to be started."""
MOST_PLACES = 3
"""Largest number of layouts tried for one training run; the next is tried only when one runs out of memory."""


@dataclass(frozen=True)
class Part:
    """Training run to measure in the GPU benchmark: model, row length, training program, precision and layout."""

    model: str
    tokens: int
    """Number of tokens in a training row."""
    program: str
    """Training program: `fsdp` or `megatron` (our engines), `transformers` (a plain loop), `trl` (its `SFTTrainer`)."""
    adapter: bool = False
    compile: bool = False
    precision: str = "bf16"
    place: int = 0
    """Index of the layout among those predicted to fit, fastest first; it grows when a layout runs out of memory."""

    @property
    def name(self) -> str:
        """Name of the training run in the result table: model, row length, LoRA or full, program."""
        how = ["LoRA" if self.adapter else "full", self.program]
        how += [word for word, said in (("compiled", self.compile), ("fp8", self.precision == "fp8")) if said]
        return " ".join([self.model, str(self.tokens), *how])

    @property
    def rows(self) -> int:
        """Number of rows in an optimizer step, enough for two micro-batches."""
        return max(2, (1024 if self.model == "tiny" else 32768) // self.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument(
        "--device",
        default="cuda",
        help="device type: cuda, or cpu to try the same programs on a tiny model (default: cuda)",
    )
    parser.add_argument(
        "--limit-s", type=float, default=1e9, help="time limit in seconds for the whole benchmark (default: none)"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        help="run only the parts whose name matches the pattern, such as `* fsdp`; may be repeated",
    )
    parser.add_argument(
        "--models", type=Path, help="folder for models with random weights, up to 30 GB (default: `models` in --out)"
    )
    arguments = parser.parse_args()
    run = Run(arguments.out, arguments.device, time.monotonic() + arguments.limit_s, arguments.models)
    for what in ordered(arguments.device):
        if not arguments.only or any(fnmatch(name_of(what), wanted) for wanted in arguments.only):
            run.part(what)
    print(table(run.rows))


def ordered(device: str) -> list[Part | str]:
    """Return all parts of the GPU benchmark (tests, matmul rates, training runs), the most informative first."""
    if device == "cpu":
        of_programs = [Part("tiny", 128, name) for name in ("fsdp", "megatron", "transformers", "trl")]
        return ["rates", *of_programs, Part("tiny", 128, "fsdp", adapter=True), Part("tiny", 128, "fsdp", compile=True)]
    fsdp, compiled, megatron, plain, theirs = (
        {"program": "fsdp"},
        {"program": "fsdp", "compile": True},
        {"program": "megatron"},
        {"program": "transformers"},
        {"program": "trl"},
    )
    lora = {"adapter": True}
    first = [Part("8b", 4096, **one, **lora) for one in (fsdp, compiled)]  # AutoModel's figure is of this
    first += [Part("4b", 4096, **one) for one in (fsdp, compiled)]
    beside = [Part("4b", 4096, **compiled, precision="fp8")]  # the same in bf16 is among the first
    beside += [Part("4b", 4096, **plain), Part("8b", 4096, **plain, **lora), Part("4b", 4096, **megatron)]
    beside += [Part("8b", 4096, **fsdp), Part("8b", 4096, **megatron, **lora), Part("4b", 4096, **theirs)]
    rest = [
        Part(model, tokens, **program, adapter=adapter)
        for tokens in (4096, 16384)
        for model in ("0.6b", "1.7b", "4b", "8b")
        for adapter in (False, True)
        for program in (fsdp, compiled, megatron, plain, theirs)
    ]
    rest = [part for part in rest if part not in first + beside]
    small = [part for part in rest if part.model == "0.6b" and part.tokens == 4096 and not part.adapter]
    rest.sort(key=lambda part: part not in small)
    return ["rates", TESTS[0], Part("0.6b", 4096, **fsdp), *first, *TESTS[1:], *beside, *rest[1:]]


def name_of(what: Part | str) -> str:
    """Return the name of a test, rate or training run in the GPU benchmark's result table."""
    return what.name if isinstance(what, Part) else what


class Run:
    """State of the GPU benchmark: its results so far, kept in `gpu.json`, so that an interrupted run can continue."""

    def __init__(self, out: Path, device: str, end_s: float, models: Path | None) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.device, self.end_s = out.resolve(), device, end_s
        self.most_s = CPU_LIMIT_S if device == "cpu" else PART_LIMIT_S
        self.models = (models or out / "models").resolve()
        self.file = self.out / "gpu.json"
        self.rows: list[dict[str, Any]] = json.loads(self.file.read_text()) if self.file.exists() else []

    def part(self, what: Part | str) -> None:
        """Run one part unless it is done or time is short; repeat one that ran out of memory with the next layout."""
        for place in range(MOST_PLACES):
            one = replace(what, place=place) if isinstance(what, Part) else what
            row = self._done(one) or self._run(one)
            if row["status"] != "out of memory":
                return

    def _done(self, what: Part | str) -> dict[str, Any] | None:
        key = asdict(what) if isinstance(what, Part) else what
        return next((row for row in self.rows if row["part"] == key and row["status"] != "no time"), None)

    def _run(self, what: Part | str) -> dict[str, Any]:
        row: dict[str, Any] = {"name": name_of(what), "part": asdict(what) if isinstance(what, Part) else what}
        if lacking := _lacking(what):
            return self._keep({**row, "status": "skipped", "reason": f"{lacking} is not installed here"})
        limit_s = min(self.most_s, self.end_s - time.monotonic())
        if limit_s < LEAST_S:
            return {**row, "status": "no time"}
        if isinstance(what, Part):
            self._make_model(what.model)
        start_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gpu-part-") as folder:
            result, log = Path(folder) / "result.json", Path(folder) / "log.txt"
            limit_s = max(1.0, min(self.most_s, self.end_s - time.monotonic()))
            code = self._process(self._command(what, result), log, limit_s)
            seconds = round(time.monotonic() - start_s, 1)
            text = log.read_text(errors="replace")
            if result.exists():
                row |= json.loads(result.read_text())
            elif isinstance(what, str) and code == 0:
                row |= {"status": "passed", "reason": text.strip().splitlines()[-1]}
            elif code is None:  # with less time than a part may have, it shall have it the next time
                ended = "timed out" if limit_s >= self.most_s else "no time"
                row |= {"status": ended, "reason": f"after {seconds:.0f} s", "log": text[-4000:]}
            else:
                row |= {"status": "failed", "reason": f"exit code {code}", "log": text[-6000:]}
        return self._keep({**row, "seconds": seconds})

    def _command(self, what: Part | str, result: Path) -> list[str]:
        if isinstance(what, Part):
            arguments = [json.dumps(asdict(what)), str(result), str(self.models), self.device]
            return [sys.executable, str(Path(__file__).with_name("gpu_part.py")), *arguments]
        if what == "rates":
            return [sys.executable, str(Path(__file__).with_name("gpu_rates.py")), str(result), self.device]
        tests = f"tests/gpu/{what}".split()
        return [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *tests]

    def _make_model(self, size: str) -> None:
        """Write a model with random weights, up to 16 GB, in a process apart, outside the training run's time limit.

        The training run itself writes the tiny model.
        """
        if size == "tiny" or (self.models / size).exists():
            return
        program = (
            "import sys; from pathlib import Path; import torch; from gpu_part import made_model; "
            "made_model(Path(sys.argv[1]) / sys.argv[2], sys.argv[2], torch.device(sys.argv[3]))"
        )
        command = [sys.executable, "-c", program, str(self.models), size, self.device]
        with tempfile.TemporaryDirectory(prefix="gpu-model-") as folder:
            self._process(command, Path(folder) / "log.txt", max(1.0, self.end_s - time.monotonic()))

    def _process(self, command: list[str], log: Path, limit_s: float) -> int | None:
        """Run a command; return its exit code, or None if it and its children were killed at its time limit."""
        from flows.launch.local import EVERYWHERE, ON_LOOPBACK
        from stages.core.supervised import SupervisedProcess

        python_path = ":".join(filter(None, [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, **EVERYWHERE, **ON_LOOPBACK, "PYTHONPATH": python_path, "HF_HUB_OFFLINE": "1"}
        with log.open("wb") as output:
            started = SupervisedProcess(command, environment=environment, output=output, folder=ROOT, grace_s=1.0)
            try:
                return started.process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                started.stop()

    def _keep(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add a result to the benchmark's files, replacing them atomically, so that a kill loses no earlier result."""
        self.rows = [other for other in self.rows if other["part"] != row["part"]] + [row]
        for file, text in ((self.file, json.dumps(self.rows, indent=1)), (self.out / "gpu.md", table(self.rows))):
            half = file.with_suffix(".half")
            half.write_text(text)
            half.replace(file)
        print(f"{row['name']}: {row['status']} ({row.get('seconds', 0)} s) {row.get('reason', '')}", flush=True)
        return row


def _lacking(what: Part | str) -> str | None:
    needed = {"trl": "trl", "megatron": "megatron"}.get(what.program) if isinstance(what, Part) else None
    if isinstance(what, Part) and what.precision == "fp8":
        needed = "torchao"
    return needed if needed and importlib.util.find_spec(needed) is None else None


def table(rows: list[dict[str, Any]]) -> str:
    """Return the GPU benchmark's results in Markdown: a table of training runs, then a table of tests and rates."""
    lines = [
        "| part | layout | tokens/s | MFU | step s (predicted) | peak GiB (predicted) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if row["status"] != "measured":
            continue
        found, params = row["metrics"], row["params"]
        layout = f"{params['layout.micro_batch_size']} rows, recompute {params['layout.recompute']}"
        mfu = "" if found["mfu"] is None else f"{found['mfu']:.1%}"
        times = f"{found['step_time_s']:.3f} ({found['predicted_step_time_s']:.3f})"
        sizes = f"{found['peak_memory_gib']:.1f} ({found['predicted_memory_gib']:.1f})"
        lines.append(f"| {row['name']} | {layout} | {found['tokens_per_s']:,.0f} | {mfu} | {times} | {sizes} |")
    lines += ["", "| rest | |", "| --- | --- |"]
    for row in rows:
        if row["status"] != "measured":
            rates = "; ".join(f"{name} {value:.4g}" for name, value in row.get("rates", {}).items())
            lines.append(f"| {row['name']} | {row['status']}: {rates or row.get('reason', '')} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
