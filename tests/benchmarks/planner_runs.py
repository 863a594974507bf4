"""Published training runs of the folder `data/` with their measured step time and memory, for `planner_accuracy.py`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from stages.planner.hardware import Efficiency
from stages.planner.memory import memory
from tests.benchmarks.predict_table import predicted_memory_gib, predicted_step_time_s
from tests.benchmarks.published_runs import BF16_BEFORE_FLASH, PublishedRun, read_table

DATA = Path(__file__).parent / "data"
SOURCES = {
    "llm-foundry": "MPT",
    "bigscience": "BLOOM",
    "Megatron-LM": "Megatron-LM 2020",
    "NVIDIA/NeMo": "NeMo 24.07",
    "Megatron-Bridge": "Megatron-Bridge",
    "torchtitan": "torchtitan",
}
"""Short names of the publications that training runs come from, by a text that occurs in the column `source`."""
FIRST_BF16_DAY = "02-28"
"""Date (month-day) from which BLOOM's runs are bf16, and accumulate gradients in fp32: 4 more bytes a parameter."""
CONTRADICTION = 1.25
"""Largest ratio of a run's step time to what its TFLOP/s imply; runs beyond it contradict themselves: left out."""


STATED_SOFTWARE = {
    "fused cross-entropy": {"fused_cross_entropy": True},
    "no TP, gradient or p2p overlap": {"overlaps_layers": False, "overlaps_gradients": False},
}
"""Settings of a run's training program, by the words in the CSV column `note` that imply them."""
ALLOCATED = "max allocated"
"""Words in the column `note` of runs whose published memory counts tensors only, without the driver and idle memory."""
RESERVED = "max reserved"
"""Words in the column `note` of runs whose published memory is all that torch's allocator reserved, gaps included."""
SEEN_SUBMITTERS = ("NVIDIA", "AMD")
"""MLPerf submitters (makers of the devices) whose runs were already known when the planner's constants were fitted."""


@dataclass(frozen=True)
class Measured:
    """A published training run with its measured step time and memory."""

    source: str
    run: PublishedRun
    step_time_s: float | None
    memory_gib: float | None
    out_of_memory: bool
    table: str | None = None
    """Held-out table of the run, to which the planner was not fitted; None for the built-in tables in `data/`."""

    @property
    def group(self) -> tuple[object, ...]:
        """Grouping key of runs that have the same model, batch, cluster and program version but different layouts."""
        run = self.run
        told_source = run.cells.get("source") if self.table else None
        return (
            self.source,
            told_source,
            run.shape.num_layers,
            run.shape.hidden_size,
            run.layout.world_size,
            run.workload,
        )

    @property
    def has_software(self) -> bool:
        """Return whether the published run describes its training program, at least its activation recomputation."""
        return not any(assumption.startswith("recompute=") for assumption in self.run.assumed)

    @property
    def is_seen(self) -> bool:
        """Return whether the measurements of this published run were known when the planner's constants were fitted."""
        if self.table == "mlperf":
            return self.run.cells["source"].split("@")[0].split()[-1] in SEEN_SUBMITTERS
        return self.table != "bridge" or self.run.workload.precision != "fp4"

    def predicted_s(self, efficiency: Efficiency | None = None) -> float:
        """Return the step time in seconds predicted for this run, with the given or the built-in planner constants."""
        return predicted_step_time_s(_with(self.run, efficiency))

    def predicted_gib(self, efficiency: Efficiency | None = None) -> float:
        """Return the peak memory in GiB predicted for this run, counting only what its published figure counts."""
        run = _with(self.run, efficiency)
        note = run.cells.get("note", "")
        if ALLOCATED not in note and RESERVED not in note:
            return predicted_memory_gib(run)
        counted = replace(efficiency or run.hardware.efficiency, runtime_gib=0.0, communicator_gib=0.0)
        counted = replace(counted, fragmentation=0.0, streams=0.0) if ALLOCATED in note else counted
        estimate = memory(run.shape, run.engine, run.layout, run.workload, software=run.software, efficiency=counted)
        return estimate.peak_gib


def all_runs() -> list[Measured]:
    """Return the built-in published runs, without those that describe their model poorly or contradict themselves."""
    tables = ("published_layouts.csv", "vtrain_single_node.csv", "later_runs.csv")
    return [measured for table in tables for measured in _runs(DATA / table)]


def runs_of(table: Path) -> list[Measured]:
    """Return the published runs of one CSV table. Each run's `source` names kind of training, device and precision."""
    found, name = [], table.stem.removesuffix("_layouts")
    for run in read_table(table)[1]:
        if isinstance(run, PublishedRun) and run.cells["iter_time_s"]:
            run = replace(run, software=replace(run.software, **_stated_software(run.cells["note"])))
            trained = "LoRA" if run.workload.adapter else "experts" if run.shape.num_experts else "dense"
            memory = run.cells["mem_gb"]
            source = f"{trained} {run.hardware.name} {run.workload.precision}"
            found.append(
                Measured(
                    source, run, _step_time_s(run), float(memory) if memory else None, run.cells["oom"] == "1", name
                )
            )
    return found


def _stated_software(note: str) -> dict[str, bool]:
    return {
        field: value for words, fields in STATED_SOFTWARE.items() if words in note for field, value in fields.items()
    }


def _runs(table: Path) -> Iterator[Measured]:
    for run in read_table(table)[1]:
        if isinstance(run, PublishedRun) and not _is_inferred(run):
            yield _measured(run)


def _measured(run: PublishedRun) -> Measured:
    cells, source = run.cells, _source(run)
    if source == "Megatron-LM 2020":  # section 5 of its paper: all of a rank's rows at once, 1,024 tokens, checkpointed
        run = replace(run, workload=replace(run.workload, sequence_length=1024))
        rows = run.workload.global_batch_size // run.layout.data_parallel_size
        layout = run.layout.model_copy(update={"micro_batch_size": rows, "recompute": "full"})
        run = replace(run, layout=layout, software=replace(run.software, recomputed_share=1.0))
    if source == "BLOOM" and cells["note"].split(";")[0][-len(FIRST_BF16_DAY) :] >= FIRST_BF16_DAY:
        run = replace(run, software=BF16_BEFORE_FLASH)
    memory = cells.get("mem_gb")
    return Measured(source, run, _step_time_s(run), float(memory) if memory else None, cells.get("oom") == "1")


def _source(run: PublishedRun) -> str:
    named = run.cells.get("source")
    if named is None:
        return f"vTrain {run.shape.hidden_size} wide"
    name = next(name for text, name in SOURCES.items() if text in named)
    return f"MPT {run.hardware.name}" if name == "MPT" else name


def _is_inferred(run: PublishedRun) -> bool:
    """Return whether a run's model sizes were guessed, or its published measurements contradict each other."""
    cells = run.cells
    if "bigscience" not in cells.get("source", ""):
        return False
    if not (cells["layers"] and cells["hidden"]):
        return True
    if not (cells["iter_time_s"] and cells["tflops_per_gpu"]):
        return False
    seconds = _megatron_flops(run) / (float(cells["tflops_per_gpu"]) * 1e12 * run.layout.world_size)
    ratio = float(cells["iter_time_s"]) / seconds
    return not 1 / CONTRADICTION < ratio < CONTRADICTION


def _step_time_s(run: PublishedRun) -> float | None:
    cells, num_gpus = run.cells, run.layout.world_size
    if milliseconds := cells.get("iteration time (ms)"):
        return float(milliseconds) / 1e3
    if cells["iter_time_s"]:
        return float(cells["iter_time_s"])
    if cells["tok_s_gpu"]:
        return run.workload.tokens_per_step / float(cells["tok_s_gpu"]) / num_gpus
    return None


def _megatron_flops(run: PublishedRun) -> float:
    """Return a published run's FLOPs a step, recomputed: 96 B s l h² (1 + s / 6h + V / 16lh), Narayanan 2021, eq. 3."""
    shape, tokens = run.shape, run.workload.tokens_per_step
    layers, hidden = shape.num_layers, shape.hidden_size
    attention, head = run.workload.sequence_length / (6 * hidden), shape.vocab_size / (16 * layers * hidden)
    return 96 * tokens * layers * hidden**2 * (1 + attention + head)


def _with(run: PublishedRun, efficiency: Efficiency | None) -> PublishedRun:
    return replace(run, hardware=replace(run.hardware, efficiency=efficiency)) if efficiency else run
