"""Reader of published training runs: turns rows of CSV tables into the planner's inputs, with defaults for empty cells.

Two formats are read: a table of layouts with the columns `model, params_b, layers, …` (cells may be empty), and
vTrain's (`# GPUs, global batch, …, iteration time (ms)`). Tables rarely describe the training program (kernels,
overlap, bytes of optimizer state): it is inferred from the year of the hardware and the model (`software_of_run`).
"""

import csv
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stages.core.errors import DataError
from stages.models.known_models import gpt, known_model
from stages.models.shape import ModelShape
from stages.parallel.layout import EngineName, Layout
from stages.planner.adapted import PlannedAdapter
from stages.planner.engines.registry import COSTS
from stages.planner.hardware import HARDWARE, Hardware
from stages.planner.memory import memory
from stages.planner.workload import ExtraPasses, PlannedPrecision, ProgramTraits, Workload

YES, NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
COLUMNS = ("model", "layers", "hidden", "heads", "seq", "gbs", "mbs", "tp", "pp", "dp", "gpus", "gpu")
"""Columns that a CSV table of published runs must have; further optional columns are read where they exist."""
FIRST_LINE = 2
"""Line number of the first row below the header of a CSV table."""
VTRAIN_COLUMNS = {
    "# GPUs": "gpus",
    "global batch": "gbs",
    "micro batch": "mbs",
    "hidden size": "hidden",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "seq",
    "tensor parallelism": "tp",
    "data parallelism": "dp",
    "pipeline parallelism": "pp",
}
FULLY_SHARDED = re.compile(r"fsdp|hsdp|full_shard|zero[-_ ]*(stage)?[-_ ]*3", re.IGNORECASE)
USUAL_LORA_RANK = 16
"""LoRA rank assumed for a run that names LoRA without a rank."""
ATTENTION = (
    "q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "c_attn", "attn.c_proj", "query_key_value", "dense", "Wqkv",
)  # fmt: skip
"""Names of the linear layers of attention in all model families: LoRA of a published run is assumed to adapt these."""
DEFAULT_SEQUENCE_LENGTH = 2048
LARGEST_MICRO_BATCH_TOKENS = 32768
NEAR_HOST_GB_PER_S = 200
"""Least bandwidth in GB/s to host memory at which offloaded activations return without delay, as on NVIDIA Grace."""
FIRST_YEAR_OF_FLASH = 2023
FIRST_RECORDED_MIXTURES = (26, 6)
"""First version (26.06) of NVIDIA's Megatron-Bridge whose fp8 recipes for mixtures of experts capture a whole step as a
CUDA graph and overlap token dispatch with compute (scripts/performance/configs of its repository)."""
UNFUSED, FIRST_FLASH = ("unfused", "eager", "core", "none"), ("flash1", "flash-1", "fa1")
"""Words in the CSV column `kernel` that mean unfused attention, and words that mean FlashAttention 1."""
BEFORE_FLASH = ProgramTraits(
    flash_attention=False,
    dropout=True,
    gradient_bytes=2,
    optimizer_bytes=16,
    overlaps_gradients=False,
    chunked_logits=False,
    gathers_gradients=False,
    fragments_states=True,
)
BF16_BEFORE_FLASH = replace(BEFORE_FLASH, gradient_bytes=4, gradient_copy_bytes=2, optimizer_bytes=12)
"""Training program assumed for published bf16 runs before FlashAttention: it also accumulates gradients in fp32."""
MODERN_MEGATRON = ProgramTraits(
    overlaps_layers=True, chunked_logits=False, fused_cross_entropy=True, gathers_gradients=False
)
FP8_MEGATRON = replace(MODERN_MEGATRON, gradient_bytes=2, keeps_frozen_in_fp8=True)
"""Program assumed for published training with Megatron in fp8: gradients are accumulated and reduced in bf16."""
EAGER_FSDP = replace(
    COSTS["fsdp"].software,
    chunked_logits=False,
    gathers_gradients=False,
    separate_embedding=False,
    keeps_every_second_product=True,
    casts_at_products=False,
)
FIRST_FSDP = replace(EAGER_FSDP, first_flash_attention=True)
NETWORKS_GB_PER_S = {"jean zay": 6.25, "p4d": 6.25, "efa": 6.25}
"""Network bandwidth of one GPU in GB/s in clusters that the column `gpu` names (Jean Zay: 4 × 100 Gb/s a node)."""
RATED_W = {"h100-80gb": 700, "h200": 700}
"""Rated power in W of GPUs that some clusters limit to less; the column `gpu` may state the actual watts."""
RATE_BY_POWER = 0.58
"""Exponent with which sustained FLOP/s grow with board power, from the pairs MI300X/MI325X and MI350X/MI355X."""
USABLE_MEMORY = 0.99
"""GiB of a GPU's memory that programs can use, for each GB in the GPU's name."""
OTHER_SIZE = 0.1
"""Smallest relative difference at which a memory size in the column `gpu` replaces the GPU's built-in size."""


class UnknownRunError(Exception):
    """Raised for a published run that does not describe its model well enough, or names an unknown GPU."""


@dataclass
class Cells:
    """Cells of a row in a CSV table of published runs, by column, and the assumptions made while reading them."""

    path: Path
    line: int
    cells: dict[str, str]
    assumed: list[str] = field(default_factory=list)

    def text(self, column: str) -> str:
        return self.cells.get(column, "")

    def number(self, column: str) -> int | None:
        """Return a cell's positive whole number (`~250k`: 250,000), None for an empty one; else raise DataError."""
        text = self.text(column).lower().lstrip("~").replace(",", "")
        if not text:
            return None
        scale = 1000 if text.endswith("k") else 1
        try:
            value = float(text.removesuffix("k")) * scale
        except ValueError:
            value = 0.0
        if value <= 0 or value != int(value):
            raise DataError(
                f"reading the table {self.path}: line {self.line}, column {column}: {self.text(column)!r} is no "
                "positive whole number"
            )
        return int(value)

    def stated(self, column: str, *in_note: str) -> str:
        """Return a CSV cell in lower case; if it is empty, the value that `note` states as `key=value`, or ""."""
        if text := self.text(column):
            return text.lower()
        for key in in_note:
            if found := re.search(rf"(?:^|;)\s*{re.escape(key)}\s*=\s*([^;]+)", self.text("note"), re.IGNORECASE):
                return found.group(1).strip().lower()
        return ""

    def switch(self, column: str, *in_note: str) -> bool | None:
        """Return a cell's yes or no, else the note's, as a bool; None without. Raises DataError for other words."""
        word = self.stated(column, *in_note)
        if not word:
            return None
        if word not in (*YES, *NO):
            raise DataError(
                f"reading the table {self.path}: line {self.line}, column {column}: {word!r} is none of "
                f"{', '.join((*YES, *NO))}"
            )
        return word in YES

    def number_or(self, column: str, default: int) -> int:
        """Return the number in a CSV cell, or the default, which is then recorded as an assumption."""
        value = self.number(column)
        if value is None:
            self.assumed.append(f"{column}={default}")
            return default
        return value


@dataclass
class UnknownRun:
    """A published run that cannot be predicted, with the reason."""

    cells: dict[str, str]
    reason: str


@dataclass
class PublishedRun:
    """A published training run as the planner's inputs: model shape, layout, workload, hardware and program."""

    cells: dict[str, str]
    shape: ModelShape
    engine: EngineName
    layout: Layout
    workload: Workload
    hardware: Hardware
    software: ProgramTraits
    assumed: list[str] = field(default_factory=list)


def read_table(path: Path) -> tuple[list[str], list[PublishedRun | UnknownRun]]:
    """Read the header and the runs of a CSV table. Raises DataError for missing columns, or a bad number's place."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            header = list(reader.fieldnames or ())
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"reading the table {path}: {error}") from error
    names = {name: name.strip() for name in header}
    is_vtrain = set(VTRAIN_COLUMNS) <= set(names.values())
    missing = [] if is_vtrain else [column for column in COLUMNS if column not in names.values()]
    if missing:
        raise DataError(
            f"reading the table {path}: missing columns: {', '.join(missing)}; expected {', '.join(COLUMNS)} "
            f"(cells may be empty), or vTrain's: {', '.join(VTRAIN_COLUMNS)}"
        )
    runs: list[PublishedRun | UnknownRun] = []
    for number, row in enumerate(rows, start=FIRST_LINE):
        cells = {names[name]: (value or "").strip() for name, value in row.items() if name is not None}
        renamed = {VTRAIN_COLUMNS.get(name, name): value for name, value in cells.items()} if is_vtrain else cells
        try:
            runs.append(replace(_run(Cells(path, number, renamed)), cells=cells))
        except UnknownRunError as error:
            runs.append(UnknownRun(cells, str(error)))
    return header, runs


def _run(cells: Cells) -> PublishedRun:
    hardware = hardware_of_run(cells)
    engine: EngineName = "fsdp" if FULLY_SHARDED.search(cells.text("shard")) else "megatron"
    shape = _shape(cells)
    software = software_of_run(cells, engine, shape, hardware)
    layout = _degrees(cells, engine, software, hardware)
    if (gpus := cells.number("gpus")) and gpus != layout.world_size:
        cells.assumed.append(f"{layout.world_size} GPUs, by its degrees")
    workload = Workload(
        sequence_length=cells.number_or("seq", DEFAULT_SEQUENCE_LENGTH),
        global_batch_size=cells.number_or("gbs", layout.data_parallel_size * layout.micro_batch_size),
        precision=precision_of(cells.text("precision")),
        passes=ExtraPasses(before_training=int("dpo" in cells.text("kind").lower())),
        adapter=_adapter(cells),
    )
    is_usual = software.flash_attention or cells.text("recompute").startswith("selective")
    stated = cells.switch("sp", "SP")
    sequence_parallel = layout.tp > 1 and (is_usual if stated is None else stated)
    compiles = engine == "fsdp" and is_compiled(cells)
    layout = layout.model_copy(update={"sequence_parallel": sequence_parallel, "compile": compiles})
    recompute = _recompute(cells)
    layout = layout.model_copy(update={"recompute": recompute or "none"})
    run = PublishedRun({}, shape, engine, layout, workload, hardware, software, cells.assumed)
    return run if recompute else _made_to_fit(run)


def _shape(cells: Cells) -> ModelShape:
    """Return a run's model shape: that of the named model if known, else from the stated sizes or parameter count."""
    known = known_model(cells.text("model"))
    layers, hidden = cells.number("layers"), cells.number("hidden")
    if known is not None and hidden in (None, known.hidden_size):
        if hidden is None:
            cells.assumed.append("sizes of the model of this name")
        return _as_stated(known, cells)
    layers, hidden = _main_sizes(cells, layers, hidden)
    heads = cells.number_or("heads", max(1, hidden // 128))
    kv_heads = cells.number("kv_heads") or heads
    ffn = cells.number("ffn") or 4 * hidden
    is_gpt = ffn == 4 * hidden and kv_heads == heads
    vocab = cells.number_or("vocab", 51200)
    base = gpt(layers, hidden, heads, vocab)
    if is_gpt:
        return base
    return ModelShape(layers, hidden, heads, kv_heads, max(1, hidden // heads), ffn, vocab)


def _as_stated(known: ModelShape, cells: Cells) -> ModelShape:
    """Return a known model's shape, but with the sizes (layers, heads and so on) that the published run states."""
    columns = {"num_layers": "layers", "num_heads": "heads", "num_kv_heads": "kv_heads", "ffn_size": "ffn"}
    stated: dict[str, Any] = {field: value for field, column in columns.items() if (value := cells.number(column))}
    if vocab := cells.number("vocab"):
        stated["vocab_size"] = vocab
    heads = stated.get("num_heads", known.num_heads)
    if heads != known.num_heads:
        stated["head_dim"] = max(1, known.query_width // heads)
    layers = stated.get("num_layers", known.num_layers)
    # A mixture of experts that was cut to fewer layers keeps the share of its dense layers.
    num_dense = math.ceil(len(known.dense_layers) * layers / known.num_layers)
    dense = known.dense_layers if layers == known.num_layers else frozenset(sorted(known.dense_layers)[:num_dense])
    return replace(known, **stated, dense_layers=dense)


def _main_sizes(cells: Cells, layers: int | None, hidden: int | None) -> tuple[int, int]:
    """Return number of layers and hidden size, guessed from 12 × layers × hidden² = parameters where one is missing.

    Where both are missing, hidden = 128 × layers.
    """
    if layers and hidden:
        return layers, hidden
    billions = re.search(r"([\d.]+)\s*b", cells.text("params_b").lower() + "b " + cells.text("model").lower())
    if not billions:
        raise UnknownRunError("layers and hidden are empty, and neither params_b nor the model's name gives them")
    parameters = float(billions.group(1)) * 1e9
    if hidden is None:
        width = (parameters / 12 * 128) ** (1 / 3) if layers is None else (parameters / 12 / layers) ** 0.5
        hidden = max(128, round(width / 128) * 128)
        cells.assumed.append(f"hidden={hidden}")
    if layers is None:
        layers = max(1, round(parameters / (12 * hidden**2)))
        cells.assumed.append(f"layers={layers}")
    return layers, hidden


def _degrees(cells: Cells, engine: EngineName, software: ProgramTraits, hardware: Hardware) -> Layout:
    tp, pp, cp = (cells.number(name) or 1 for name in ("tp", "pp", "cp"))
    gpus, dp = cells.number("gpus"), cells.number("dp")
    if dp is None:
        dp = max(1, (gpus or tp * pp * cp) // (tp * pp * cp))
        cells.assumed.append(f"dp={dp}")
    shards = _shards(cells, engine, software, hardware, dp)
    return Layout.model_construct(
        **{
            **Layout().model_dump(),
            "tp": tp, "pp": pp, "cp": cp, "vpp": cells.number("vpp") or 1, "ep": cells.number("ep") or 1,
            "dp_shard": shards, "dp_replicate": dp // shards,
            "micro_batch_size": cells.number_or("mbs", _micro_batch(cells, pp, dp)),
        }
    )  # fmt: skip


def _shards(cells: Cells, engine: EngineName, software: ProgramTraits, hardware: Hardware, dp: int) -> int:
    """Return the processes that shard optimizer state (FSDP: weights and gradients, too); under HSDP, a node's.

    Modern Megatron is assumed to shard unless the row denies it.
    """
    text = cells.text("shard").lower()
    if "hsdp" in text and dp % hardware.gpus_per_node == 0:
        return hardware.gpus_per_node
    if engine == "fsdp" or text not in ("", "ddp", "none"):
        return dp
    if text or dp == 1 or not software.flash_attention:
        return 1
    cells.assumed.append("distributed optimizer")
    return dp


def _adapter(cells: Cells) -> PlannedAdapter | None:
    """Return a run's LoRA adapter, if any; by default rank 16 on attention, as in NVIDIA's programs."""
    named = re.search(r"lora\D*(\d+)?", " ".join(cells.text(column).lower() for column in ("kind", "shard")))
    if not named:
        return None
    if not named.group(1):
        cells.assumed.append(f"lora rank={USUAL_LORA_RANK}")
    cells.assumed.append("adapters on attention")
    return PlannedAdapter(int(named.group(1) or USUAL_LORA_RANK), ATTENTION)


def _micro_batch(cells: Cells, pp: int, dp: int) -> int:
    """Return the micro-batch size of a run that states none.

    It is all rows of a process if there is no pipeline and they have at most 32,768 tokens, else one row.
    """
    rows = (cells.number("gbs") or dp) // dp
    all_at_once = pp == 1 and rows * (cells.number("seq") or DEFAULT_SEQUENCE_LENGTH) <= LARGEST_MICRO_BATCH_TOKENS
    return max(1, rows) if all_at_once else 1


def _recompute(cells: Cells) -> str | None:
    """Return the activation recomputation that a run states (full, selective or none); None if it states nothing."""
    text = cells.text("recompute").lower()
    if cells.stated("recompute_layers", "recompute layers"):
        return "full"
    return next((word for word in ("full", "selective", "none") if text.startswith(word)), None)


def _made_to_fit(run: PublishedRun) -> PublishedRun:
    """Assume the least activation recomputation that makes a run fit in memory, for runs that state no recomputation.

    Where the host's memory is fast (Grace), those layers' activations are offloaded, as in NVIDIA's recipes.
    """
    is_near = run.hardware.host_gb_per_s >= NEAR_HOST_GB_PER_S
    all_layers = run.shape.num_layers
    fitting = (num for num in range(all_layers + 1) if _fits(_relieved(run, num, is_near)))
    num = next(fitting, all_layers)
    if is_near and num:
        run.assumed.append(f"recompute=none, activations of {num} layers in the host's memory")
    else:
        run.assumed.append("recompute=none" if not num else f"recompute=full of {num} layers")
    return _relieved(run, num, is_near)


def _relieved(run: PublishedRun, num_layers: int, is_near: bool) -> PublishedRun:
    """Return the run with `num_layers` layers' activations recomputed, or offloaded to fast host memory (`is_near`)."""
    if not num_layers:
        return run
    share = num_layers / run.shape.num_layers
    if is_near:
        return replace(run, software=replace(run.software, offloaded_share=share))
    layout = run.layout.model_copy(update={"recompute": "full"})
    return replace(run, layout=layout, software=replace(run.software, recomputed_share=share))


def _fits(run: PublishedRun) -> bool:
    needed = memory(run.shape, run.engine, run.layout, run.workload, software=run.software)
    return needed.peak_gib <= run.hardware.memory_gib


def software_of_run(cells: Cells, engine: EngineName, shape: ModelShape, hardware: Hardware) -> ProgramTraits:
    """Return the training program of a published run: the usual one of its year, with the changes that its row states.

    Rows state it in the columns `kernel`, `overlap`, `overlap_experts`, `overlap_gradients`, `cuda_graphs`,
    `fp8_attention`, `fp8_activations`, `fused_cross_entropy`, `compile`, `recompute_layers`, or as `key=value` in
    `note`.
    """
    changes: dict[str, Any] = {}
    if is_compiled(cells):
        changes |= {"fused_elementwise": True, "compiled_layers": True}
    if kernel := cells.stated("kernel"):
        changes["flash_attention"] = kernel not in UNFUSED
        changes["first_flash_attention"] = kernel in FIRST_FLASH
    switches = {
        "overlaps_layers": cells.switch("overlap", "tp overlap"),
        "overlaps_experts": cells.switch("overlap_experts"),
        "overlaps_gradients": cells.switch("overlap_gradients"),
        "cuda_graphs": cells.switch("cuda_graphs", "cudagraph"),
        "fused_cross_entropy": cells.switch("fused_cross_entropy", "fused cross-entropy"),
        "fused_elementwise": cells.switch("fused_elementwise"),
        "keeps_logits": cells.switch("keeps_logits"),
        "fp8_attention": cells.switch("fp8_attention", "fp8 attention"),
        "fp8_activation_inputs": cells.switch("fp8_activations", "activation input in fp8"),
    }
    changes |= {name: value for name, value in switches.items() if value is not None}
    if layers := cells.stated("recompute_layers", "recompute layers"):
        changes["recomputed_share"] = min(1.0, int(layers) / shape.num_layers)
    return replace(_of_its_time(cells, engine, shape, hardware), **changes)


def _of_its_time(cells: Cells, engine: EngineName, shape: ModelShape, hardware: Hardware) -> ProgramTraits:
    """Return the training program that was usual in a run's year: Megatron or FSDP, with or without FlashAttention.

    FSDP (but Megatron's) is eager, FSDP1 with the first FlashAttention. Megatron on V100, and GPTs on A100, predate
    FlashAttention (mid 2022) unless their source names a later year.
    """
    origin = " ".join(cells.text(column).lower() for column in ("source", "shard"))
    if engine == "fsdp" and not re.search("megatron|nemo", origin):
        return FIRST_FSDP if "fsdp1" in origin else EAGER_FSDP
    years = [int(year) for year in re.findall(r"\b20[12]\d\b", origin)]
    old = hardware.name.startswith("v100") or (hardware.name.startswith("a100") and shape.family == "gpt2")
    old = old and max(years, default=0) < FIRST_YEAR_OF_FLASH
    cells.assumed.append("attention without flash" if old else "flash attention")
    if not old:
        software = FP8_MEGATRON if precision_of(cells.text("precision")) in ("fp8", "fp4") else MODERN_MEGATRON
        version = re.search(r"megatron-bridge (\d+)\.(\d+)", origin)
        recorded = version is not None and (int(version[1]), int(version[2])) >= FIRST_RECORDED_MIXTURES
        if recorded and shape.num_experts:
            cells.assumed.append("steps launched from a recording")
            return replace(software, cuda_graphs=True, overlaps_experts=True)
        return software
    return BF16_BEFORE_FLASH if cells.text("precision").lower() == "bf16" else BEFORE_FLASH


def is_compiled(cells: Cells) -> bool:
    """Return whether a run's row states that its layers are compiled by torch.compile."""
    return bool(cells.switch("compile", "compile"))


def precision_of(text: str) -> PlannedPrecision:
    """Return the training precision that a text names: fp4, fp8, bf16 or fp32; bf16 if it names none."""
    lowered = text.lower()
    for few_bits in ("fp4", "fp8"):
        if few_bits in lowered:
            return few_bits
    return "fp32" if "fp32" in lowered else "bf16"


def hardware_of_run(cells: Cells) -> Hardware:
    """Return the built-in hardware that a `gpu` cell names, changed by its text, such as `H100-96GB HBM2e, 2.4 TB/s`.

    The text may state network, memory bandwidth, power and memory. Raises UnknownRunError for unknown devices.
    """
    text = cells.text("gpu").lower()
    words = re.sub(r"[^a-z0-9]+", " ", text or "a100").split()
    matches = [name for name in HARDWARE if set(re.sub(r"-\d+gb$", "", name).split("-")) <= set(words)]
    if not matches:
        raise UnknownRunError(f"gpu {cells.text('gpu')!r} is none of {', '.join(HARDWARE)}")
    sized = [name for name in matches if name.split("-")[-1] in words]
    name = sized[0] if sized else matches[-1]
    if not text or (not sized and len(matches) > 1):
        cells.assumed.append(f"gpu={name}")
    network = next((rate for cluster, rate in NETWORKS_GB_PER_S.items() if cluster in text), None)
    hardware = replace(HARDWARE[name], inter_node_gb_per_s=network) if network else HARDWARE[name]
    if bandwidth := re.search(r"\b(\d+(?:\.\d+)?) ?tb/s", text):
        hardware = replace(hardware, memory_gb_per_s=1000 * float(bandwidth.group(1)))
    if watts := re.search(r"\b(\d+) ?w\b", text):
        share = (float(watts.group(1)) / RATED_W.get(name, float(watts.group(1)))) ** RATE_BY_POWER
        hardware = replace(hardware, sustained=share * hardware.sustained)
    size = re.search(r"\b(\d+) ?gi?b\b", text)
    memory_gib = USABLE_MEMORY * float(size.group(1)) if size and not sized else hardware.memory_gib
    differs = abs(memory_gib / hardware.memory_gib - 1) > OTHER_SIZE
    return replace(hardware, memory_gib=memory_gib) if differs else hardware
