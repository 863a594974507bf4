"""Benchmark of one GPU that is there for minutes: which parts run, how fast, in how much memory, against predictions.

Run: `deploy/gpu-kit.sh`, or `python tests/benchmarks/gpu.py --out FOLDER`, again and again until nothing is left to do.
A preflight (`gpu_preflight.py`) stops with one sentence where nothing can run, and measures the device's rates. Parts
follow in the order of what is worth most to know: training steps (`gpu_part.py`), the tests of `tests/gpu` all beside
each other, and 8-bit products last. Each is a process of at most three minutes; `gpu.json` and `gpu.md` are written
after each, in `$OUT` too, and the tests' JUnit report, for `tests/matrix.py`. Started again, it goes on with what is
not in `gpu.json`, and repeats what failed once the code has changed.
`lifecycle calibrate --measured FOLDER/gpu.json --out FILE` fits the planner to it.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMAND_LIMIT_S = 530
"""Default time limit in seconds of one start of the benchmark: no command takes over nine minutes."""
PART_LIMIT_S = 175
CPU_LIMIT_S = 600
"""Time limit in seconds of each part of the benchmark on a CPU, where it only proves that the programs run."""
MOST_PLACES = 3
"""Largest number of layouts tried for one training run; the next is tried only when one runs out of memory."""
FINISHED = ("measured", "passed")
"""Statuses of parts that are not run again, whichever code they ran."""
REPORT = "gpu.xml"
"""Name of the JUnit report of the tests."""
TESTS = "tests"
"""Name of the part that runs `tests/gpu`."""
TEST_PROCESSES = 12
"""Number of tests that run beside each other: each is small, and mostly starts Python or compiles."""
SMALL = {"wide": "narrow", "8b": "tiny", "0.6b": "tiny", "vl": "tiny-vl"}
"""Models that take the place of others on a CPU."""


@dataclass(frozen=True)
class Part:
    """Training run to measure in the GPU benchmark: model, row length, training program, precision and layout."""

    model: str
    """Name in `gpu_part.SIZES`. A model of several depths is measured at each, to tell the time of one layer."""
    tokens: int = 4096
    """Number of tokens in a training row."""
    learns: str = "full"
    """Name in `gpu_part.LEARNS` of what is trained: `full`, `bf16 full` (low-precision AdamW), `LoRA`, `nf4 LoRA`."""
    program: str = "fsdp"
    """Training program: `fsdp` or `megatron` (our engines), `transformers` (a plain loop)."""
    recompute: str = ""
    """Recomputation of a layout with one row in a micro-batch; empty: the layout predicted to be fastest."""
    compile: bool = False
    precision: str = "bf16"
    documents: int = 1
    """Number of documents of uneven lengths that are packed into each row."""
    pictures: int = 0
    """Number of pictures in each row, of a model that sees."""
    attention: str = ""
    """Attention kernel that is preferred (`LIFECYCLE_ATTENTION`)."""
    place: int = 0
    """Index of the layout among those predicted to fit, fastest first; it grows when a layout runs out of memory."""

    @property
    def name(self) -> str:
        """Name of the training run in the result table: model, row length, what is trained, program, and the rest."""
        documents = f"{self.documents} documents" if self.documents > 1 else ""
        pictures = f"{self.pictures} pictures" if self.pictures else ""
        how = ["compiled" if self.compile else "", "fp8" if self.precision == "fp8" else "", documents, pictures]
        how.append(self.attention)
        return " ".join(filter(None, [self.model, str(self.tokens), self.learns, self.program, self.recompute, *how]))

    @property
    def rows(self) -> int:
        """Number of rows in an optimizer step, enough for two micro-batches."""
        return {"wide": 2, "narrow": 2, "vl": 2, "tiny-vl": 2, "tiny": 8}.get(self.model, max(2, 32768 // self.tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument(
        "--device",
        default="cuda",
        help="device type: cuda, or cpu to try the same programs on tiny models (default: cuda)",
    )
    parser.add_argument(
        "--limit-s", type=float, default=COMMAND_LIMIT_S, help="time limit in seconds (default: %(default)s)"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        help="run only the parts whose name matches the pattern, such as `* fsdp`; may be repeated",
    )
    parser.add_argument("--models", type=Path, help="folder for models with random weights, up to 30 GB")
    arguments = parser.parse_args()
    run = Run(arguments.out, arguments.device, time.monotonic() + arguments.limit_s, arguments.models)
    names = arguments.only or ["*"]
    chosen = [what for what in ordered(run.device) if any(fnmatch(name_of(what), name) for name in names)]
    if any(not run.is_done(what) for what in chosen) and run.part("preflight")["status"] != "ready":
        sys.exit("nothing was started: the preflight's line above says why")
    for what in chosen:
        run.part(what)
    print(table(run.rows))
    left = sum(not run.is_done(what) for what in chosen)
    if not left:
        shutil.rmtree(run.models, ignore_errors=True)  # they may lie in memory
    print(f"{left} parts are left: start this again" if left else "nothing is left to do")


def ordered(device: str) -> list[Part | str]:
    """Return all parts of the GPU benchmark, training runs and tests, the most informative first, fp8 last."""
    how = ("selective", "none", "full")
    eager, compiled = (
        [Part("wide", recompute=one, compile=is_compiled) for one in how] for is_compiled in (False, True)
    )
    lora = Part("8b", learns="LoRA")
    seeing = [Part("vl", recompute="selective", pictures=6, compile=is_compiled) for is_compiled in (False, True)]
    parts = [
        *[eager[0], lora, *eager[1:], replace(eager[0], documents=30), replace(eager[0], learns="bf16 full")],
        *[*seeing, *compiled, replace(lora, learns="nf4 LoRA"), replace(lora, compile=True), Part("0.6b")],
        *[replace(one, attention="flash") for one in (eager[0], lora)],
        replace(eager[1], recompute="offload"),
        *[replace(eager[1], program=program) for program in ("transformers", "megatron")],
        replace(lora, program="transformers"),
    ]
    last = [replace(one, precision="fp8") for one in (*eager, *compiled)]
    if device == "cpu":
        parts, last = ([replace(one, model=SMALL[one.model], tokens=128) for one in some] for some in (parts, last))
    return [*parts, TESTS, *last]


def name_of(what: Part | str) -> str:
    """Return the name of a test or training run in the GPU benchmark's result table."""
    return what.name if isinstance(what, Part) else what


def expected_s(what: Part | str) -> float:
    """Return a guess of a part's seconds on an H100: with less left, the part waits for the next start."""
    if isinstance(what, str):
        return {TESTS: 130.0}.get(what, 25.0)
    return (70 if what.model == "8b" else 30) + 15 * what.compile


class Run:
    """State of the GPU benchmark: its results so far, kept in `gpu.json`, so that an interrupted run can continue."""

    def __init__(self, out: Path, device: str, end_s: float, models: Path | None) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.device, self.end_s = out.resolve(), device, end_s
        self.most_s = CPU_LIMIT_S if device == "cpu" else PART_LIMIT_S
        self.models = (models or out / "models").resolve()
        self.file = self.out / "gpu.json"
        self.rows: list[dict[str, Any]] = json.loads(self.file.read_text()) if self.file.exists() else []
        sources = [*ROOT.glob("stages/**/*.py"), *ROOT.glob("tests/gpu/*.py"), *Path(__file__).parent.glob("gpu*.py")]
        self.code = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(sources))).hexdigest()[:12]

    def part(self, what: Part | str) -> dict[str, Any]:
        """Run one part unless it is done or time is short; repeat one that ran out of memory with the next layout."""
        for place in range(MOST_PLACES):
            candidate = replace(what, place=place) if isinstance(what, Part) else what
            row = self._done(candidate) or self._run(candidate)
            if row["status"] != "out of memory":
                break
        return row

    def is_done(self, what: Part | str) -> bool:
        """Return whether a part has a result that another start would not change."""
        rows = (
            [self._done(replace(what, place=place)) for place in range(MOST_PLACES)] if isinstance(what, Part) else []
        )
        tried = [row for row in rows or [self._done(what)] if row]
        return len(tried) == MOST_PLACES or any(row["status"] != "out of memory" for row in tried)

    def _done(self, what: Part | str) -> dict[str, Any] | None:
        key = asdict(what) if isinstance(what, Part) else what
        row = next((row for row in self.rows if row["part"] == key and row["part"] != "preflight"), None)
        is_final = row and (row["status"] in FINISHED or (row["status"] != "no time" and row.get("code") == self.code))
        return row if is_final else None

    def _run(self, what: Part | str) -> dict[str, Any]:
        row: dict[str, Any] = {"name": name_of(what), "part": asdict(what) if isinstance(what, Part) else what}
        if lacking := _lacking(what, self.device):
            return self._keep({**row, "status": "skipped", "reason": lacking})
        limit_s = min(self.most_s, self.end_s - time.monotonic())
        if limit_s < expected_s(what):
            return {**row, "status": "no time"}
        start_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gpu-part-") as folder:
            result, log = Path(folder) / "result.json", Path(folder) / "log.txt"
            code = self._process(self._command(what, result), log, limit_s)
            seconds = round(time.monotonic() - start_s, 1)
            text = log.read_text(errors="replace")
            ending = "timed out" if code is None else f"exit code {code}"
            if result.exists():  # with what was known when it ended
                row |= json.loads(result.read_text()) | ({"ending": ending, "log": text[-4000:]} if code != 0 else {})
            elif isinstance(what, str) and code == 0:
                row |= {"status": "passed", "reason": text.strip().splitlines()[-1]}
            elif code is None:  # with less time than a part may have, it shall have it the next time
                status = "timed out" if limit_s >= self.most_s else "no time"
                row |= {"status": status, "reason": f"after {seconds:.0f} s", "log": text[-4000:]}
            else:
                last = (text.strip().splitlines() or [""])[-1]
                row |= {"status": "failed", "reason": f"{ending}: {last}", "log": text[-6000:]}
        return self._keep({**row, "seconds": seconds})

    def _command(self, what: Part | str, result: Path) -> list[str]:
        if isinstance(what, Part):
            arguments = [json.dumps(asdict(what)), str(result), str(self.models), self.device]
            return [sys.executable, str(Path(__file__).with_name("gpu_part.py")), *arguments]
        if what == "preflight":
            arguments = [str(result), self.device, str(self.models)]
            return [sys.executable, str(Path(__file__).with_name("gpu_preflight.py")), *arguments]
        beside = str(TEST_PROCESSES if self.device != "cpu" else 1)
        options = ["-q", "--no-header", "-p", "no:cacheprovider", "--numprocesses", beside]
        options += ["--junitxml", str(self.out / REPORT), "-o", "junit_family=xunit1"]
        options += ["-o", f"junit_suite_name={os.environ.get('COMMIT', 'unknown')}"]
        return [sys.executable, "-m", "pytest", *options, "tests/gpu"]

    def _process(self, command: list[str], log: Path, limit_s: float) -> int | None:
        """Run a command; return its exit code, or None if it and its children were killed at its time limit."""
        from flows.launch.local import EVERYWHERE, ON_LOOPBACK
        from stages.core.supervised import SupervisedProcess

        python_path = ":".join(filter(None, [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, **EVERYWHERE, **ON_LOOPBACK, "PYTHONPATH": python_path, "HF_HUB_OFFLINE": "1"}
        if self.device == "cpu":
            environment |= {"TESTS_GPU_ON": "cpu"}
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
        row["code"] = self.code
        self.rows = [other for other in self.rows if other["part"] != row["part"]] + [row]
        texts = {"gpu.json": json.dumps(self.rows, indent=1), "gpu.md": table(self.rows)}
        # A folder whose files are taken from the machine even if this command is killed, where there is one.
        for folder in filter(None, (self.out, os.environ.get("OUT"))):
            for name, text in texts.items():
                half = Path(folder, f"{name}.half")
                half.write_text(text)
                half.replace(Path(folder, name))
            if (report := self.out / REPORT).exists() and Path(folder) != self.out:
                shutil.copy(report, folder)
        print(f"{row['name']}: {row['status']} ({row.get('seconds', 0)} s) {row.get('reason', '')}", flush=True)
        return row


def _lacking(what: Part | str, device: str) -> str | None:
    """Return why a part cannot run on this machine, such as a package that is not installed, or None."""
    if isinstance(what, str):
        return None
    if what.precision == "fp8" and device == "cpu":
        return "products in 8 bits are for GPUs"
    if what.compile and not any(map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))):
        return "no C compiler is installed here, which Triton needs"
    needed = "torchao" if what.precision == "fp8" else "megatron" if what.program == "megatron" else None
    needed = "torchvision" if what.pictures else needed
    return f"{needed} is not installed here" if needed and importlib.util.find_spec(needed) is None else None


def table(rows: list[dict[str, Any]]) -> str:
    """Return the GPU benchmark's results in Markdown: a table of training runs, then a table of the rest."""
    lines = [
        "| part | layout | tokens/s | MFU | step s (predicted) | peak GiB (predicted) | retries | ms a layer |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if row["status"] != "measured":
            continue
        found, params, layer = row["metrics"], row["params"], row.get("layer_ms")
        layout = f"{params['layout.micro_batch_size']} rows, recompute {params['layout.recompute']}"
        mfu = "" if found["mfu"] is None else f"{found['mfu']:.1%}"
        times = f"{found['step_time_s']:.3f} ({found['predicted_step_time_s']:.3f})"
        sizes = f"{found['peak_memory_gib']:.1f} ({found['predicted_memory_gib']:.1f})"
        retries = f"{found.get('num_alloc_retries', 0):.0f}"
        parts = (
            "" if not layer else ", ".join(f"{name} {ms:.1f}" for name, ms in layer["kernels"].items() if ms >= 0.05)
        )
        depth = "" if not layer else f"{layer['step']:.1f} ({layer['predicted']:.1f}): {parts}"
        cells = (row["name"], layout, f"{found['tokens_per_s']:,.0f}", mfu, times, sizes, retries, depth)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| rest | |", "| --- | --- |"]
    for row in rows:
        if row["status"] != "measured":
            lines.append(f"| {row['name']} | {row['status']}: {row.get('reason', '')} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
