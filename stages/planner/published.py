"""Tables of published runs → what the planner needs to predict them, with the defaults that were assumed. Pure but for
reading the file.

Two formats: the columns of a table of layouts (`model, params_b, layers, …`, cells may be empty), and vTrain's
(`# GPUs, global batch, …, iteration time (ms)`). How the training program worked is not in them; it is inferred from
the year that the hardware and the model are of (see `published_software`).
"""

from __future__ import annotations

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
from stages.planner.hardware import Hardware
from stages.planner.low_rank import LowRank
from stages.planner.memory import memory
from stages.planner.published_cells import Cells, UnknownRunError
from stages.planner.published_hardware import hardware_of_run
from stages.planner.published_software import is_compiled, precision_of, software_of_run
from stages.planner.workload import Passes, Software, Workload

COLUMNS = ("model", "layers", "hidden", "heads", "seq", "gbs", "mbs", "tp", "pp", "dp", "gpus", "gpu")
"""Columns that a table must have; others that are read: see `_run`."""
FIRST_LINE = 2
"""Of a table's rows, beneath its header."""
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
ATTENTION = (
    "q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "c_attn", "attn.c_proj", "query_key_value", "dense", "Wqkv",
)  # fmt: skip
"""Its linear layers, by the names that families give them."""
DEFAULT_SEQUENCE_LENGTH = 2048
LARGEST_MICRO_BATCH_TOKENS = 32768
NEAR_HOST_GB_PER_S = 200
"""From which on activations come back from the host as fast as layers need them."""


@dataclass
class UnknownRun:
    """A row that cannot be predicted, and why."""

    cells: dict[str, str]
    reason: str


@dataclass
class PublishedRun:
    """A row that can be predicted."""

    cells: dict[str, str]
    shape: ModelShape
    engine: EngineName
    layout: Layout
    workload: Workload
    hardware: Hardware
    software: Software
    assumed: list[str] = field(default_factory=list)


def read_table(path: Path) -> tuple[list[str], list[PublishedRun | UnknownRun]]:
    """The header and all rows. Raises DataError naming missing columns, or row and column of what is no number."""
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
        passes=Passes(before_training=int("dpo" in cells.text("kind").lower())),
        adapter=_adapter(cells),
    )
    usual = software.flash_attention or cells.text("recompute").startswith("selective")
    said = cells.switch("sp", "SP")
    sequence_parallel = layout.tp > 1 and (usual if said is None else said)
    compiles = engine == "fsdp" and is_compiled(cells)
    layout = layout.model_copy(update={"sequence_parallel": sequence_parallel, "compile": compiles})
    recompute = _recompute(cells)
    layout = layout.model_copy(update={"recompute": recompute or "none"})
    run = PublishedRun({}, shape, engine, layout, workload, hardware, software, cells.assumed)
    return run if recompute else _made_to_fit(run)


def _shape(cells: Cells) -> ModelShape:
    """From the sizes; without them by the model's name; without that from the number of parameters."""
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
    """A known model with the sizes that the row has instead of its own."""
    columns = {"num_layers": "layers", "num_heads": "heads", "num_kv_heads": "kv_heads", "ffn_size": "ffn"}
    stated: dict[str, Any] = {field: value for field, column in columns.items() if (value := cells.number(column))}
    if vocab := cells.number("vocab"):
        stated["vocab_size"] = vocab
    heads = stated.get("num_heads", known.num_heads)
    if heads != known.num_heads:
        stated["head_dim"] = max(1, known.query_width // heads)
    layers = stated.get("num_layers", known.num_layers)
    num_dense = math.ceil(len(known.dense_layers) * layers / known.num_layers)  # of a model cut short, as large a share
    dense = known.dense_layers if layers == known.num_layers else frozenset(sorted(known.dense_layers)[:num_dense])
    return replace(known, **stated, dense_layers=dense)


def _main_sizes(cells: Cells, layers: int | None, hidden: int | None) -> tuple[int, int]:
    """Layers and hidden size; what is missing follows from 12 × layers × hidden² parameters, 128 wide a layer."""
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


def _degrees(cells: Cells, engine: EngineName, software: Software, hardware: Hardware) -> Layout:
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


def _shards(cells: Cells, engine: EngineName, software: Software, hardware: Hardware, dp: int) -> int:
    """Ranks that share Adam, or everything: under HSDP those of a node; today's Megatron shares unless it says not."""
    text = cells.text("shard").lower()
    if "hsdp" in text and dp % hardware.gpus_per_node == 0:
        return hardware.gpus_per_node
    if engine == "fsdp" or text not in ("", "ddp", "none"):
        return dp
    if text or dp == 1 or not software.flash_attention:
        return 1
    cells.assumed.append("distributed optimizer")
    return dp


def _adapter(cells: Cells) -> LowRank | None:
    """Of a run that names LoRA: of rank 16 if it does not say, on attention, as NVIDIA's programs have it."""
    named = re.search(r"lora\D*(\d+)?", " ".join(cells.text(column).lower() for column in ("kind", "shard")))
    if not named:
        return None
    if not named.group(1):
        cells.assumed.append(f"lora rank={USUAL_LORA_RANK}")
    cells.assumed.append("adapters on attention")
    return LowRank(int(named.group(1) or USUAL_LORA_RANK), ATTENTION)


def _micro_batch(cells: Cells, pp: int, dp: int) -> int:
    """All rows of a rank at once where there is no pipeline to fill and they are not too many."""
    rows = (cells.number("gbs") or dp) // dp
    all_at_once = pp == 1 and rows * (cells.number("seq") or DEFAULT_SEQUENCE_LENGTH) <= LARGEST_MICRO_BATCH_TOKENS
    return max(1, rows) if all_at_once else 1


def _recompute(cells: Cells) -> str | None:
    """What the row says of it, if anything."""
    text = cells.text("recompute").lower()
    if cells.said("recompute_layers", "recompute layers"):
        return "full"
    return next((word for word in ("full", "selective", "none") if text.startswith(word)), None)


def _made_to_fit(run: PublishedRun) -> PublishedRun:
    """A run that says nothing of it keeps all activations. If they do not fit, those of as few layers as possible wait
    in the host's memory, where that is near (as in NVIDIA's recipes for Grace), or are recomputed."""
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
    """The run without the activations of so many layers."""
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
