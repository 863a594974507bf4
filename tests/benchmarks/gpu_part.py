"""Measurement of one training run of the GPU benchmark, in a process of its own.

Run: `gpu_part.py PART RESULT MODELS DEVICE`.
PART is JSON (`Part`); RESULT is written after each depth of the model; models of random weights are kept in MODELS.
All tokens of the rows are learned from, as the planner has it. A plain loop trains in the same precision (fp32 weights,
bf16 products), with the same AdamW, and recomputes what our engine recomputes.
"""

import json
import os
import re
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from gpu import Part
from gpu_steps import ADAPTER, Program, Steps, batch, plain_loop, timed
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3Config

from stages.data.batch import Batch
from stages.engines.attention_kernels import SWITCH
from stages.engines.engine import free_memory
from stages.engines.media import with_media
from stages.engines.registry import BUILDERS, EngineInputs
from stages.engines.settings import MediaSettings
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.sft import SftLoss
from stages.kinds.train.metrics import GIB, forget_peak_memory, host_peak_bytes
from stages.models.facts import ModelFacts
from stages.models.known_vision import SEEING
from stages.models.processor import MediaProcessor
from stages.models.shape import ModelShape
from stages.models.start_up import hide_unused_packages
from stages.models.walked import shape_of
from stages.parallel.accelerator import device_name, free_bytes, peak_bytes
from stages.parallel.devices import device_peak
from stages.parallel.processes import joined_processes
from stages.planner.costs import SearchRequest
from stages.planner.hardware import hardware_at_hand
from stages.planner.search import Candidate, estimate, memory_fit
from stages.planner.workload import RowMedia

SIZES = {  # of Qwen3: width, feed-forward width, depths, heads, key/value heads, head width, vocabulary, tied
    "0.6b": (1024, 3072, (28,), 16, 8, 128, 151936, True),
    "8b": (4096, 12288, (36,), 32, 8, 128, 151936, False),
    "wide": (4096, 12288, (4, 8), 32, 8, 128, 151936, False),
    "tiny": (64, 128, (2,), 4, 2, 16, 512, True),
    "narrow": (64, 128, (1, 2), 4, 2, 16, 512, False),
}
"""Sizes of models by name. One of several depths is measured at each; differences are then those of layers alone."""
SEES = {"vl": ("qwen2.5 vl 7b", (2, 4)), "tiny-vl": ("", (1, 2))}
"""Models that see: name in `SEEING`, empty for the zoo's tiny one, and depths of the part that reads text."""
WORD = 1
"""Token between pictures, and in place of those drawn at random that stand for a picture."""
PICTURE = {"vl": (640, 480), "tiny-vl": (40, 40)}
"""Width and height in pixels of the pictures that these models see."""
BF16_STATES = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "bf16_stochastic_round": True}
LEARNS: dict[str, dict[str, Any]] = {
    "full": {},
    "bf16 full": {"optimizer": BF16_STATES},
    "LoRA": {"adapter": ADAPTER},
    "nf4 LoRA": {"adapter": {**ADAPTER, "base_precision": "nf4"}},
}
"""Fields of a train stage's config by what is trained."""
WARMUP_STEPS = 2
STEPS = 5
NUM_KERNELS = 12
"""Number of the slowest kernels that the profile of a training step reports."""
CLASSES = {
    "attention": "flash|fmha|attention|attn",
    "collectives": "nccl|gloo|c10d",
    "generated": "triton",
    "optimizer": "adam",
    "products": r"gemm|cutlass|nvjet|cublas|xmma|mkldnn|::(add|b|_scaled_)?mm\b",
    "copies": "memcpy|memset|copy|catarray|chunk_cat|split_with_sizes|aten::cat|fill",
}
"""Pattern of kernels' names by class; the first that matches counts. Operators' names, on a CPU, match as well."""


def config_of(part: Part, **layout: Any) -> TrainConfig:
    """Return a train stage's config for a training run of the GPU benchmark; `layout` gives the layout's fields."""
    engine = part.program if part.program == "megatron" else "fsdp"
    return TrainConfig.model_validate(
        {
            "kind": "train",
            "method": "sft",
            "model": "model",
            "data": {"dataset": "rows", "sequence_length": part.tokens},
            "global_batch_size": part.rows,
            "learning_rate": 1e-5,
            "precision": part.precision,
            "engine": engine,
            "layout": {"compile": part.compile, **layout} if engine == "fsdp" else layout,
            **LEARNS[part.learns],
        }
    )


def main() -> None:
    part, result, models = Part(**json.loads(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    if part.attention:
        os.environ[SWITCH] = part.attention
    hide_unused_packages()
    with joined_processes() as device:
        if device.type != sys.argv[4]:
            raise SystemExit(f"{sys.argv[4]} was asked for, and torch found {device.type}")
        shallow: dict[str, Any] | None = None
        for depth in depths(part.model):
            folder = made_model(models / f"{part.model}-{depth}", part.model, depth, device)
            # 0 unless the engine of the depth before outlives its last reference, and disturbs this measurement.
            held_gib = torch.accelerator.memory_allocated(device) / GIB if device.type != "cpu" else 0.0
            row = {"name": part.name, "part": asdict(part), "depth": depth, "held_gib": held_gib}
            row |= tried(part, folder, device)
            is_measured = row["status"] == "measured"
            if shallow and is_measured:
                row |= {"shallow": shallow["metrics"], "layer_ms": layer_ms(shallow, row)}
            elif shallow:
                row = {**shallow, "reason": f"{depth} layers: {row['status']}: {row['reason']}"}
            result.write_text(json.dumps(row))
            if not is_measured:
                break
            shallow = row
            free_memory()


def layer_ms(shallow: dict[str, Any], deep: dict[str, Any]) -> dict[str, Any]:
    """Return the milliseconds and kernels that one more layer adds to a step: measured, predicted, by class."""
    layers = deep["depth"] - shallow["depth"]

    def added(values: dict[str, float], fewer: dict[str, float]) -> dict[str, float]:
        return {name: (value - fewer.get(name, 0)) / layers for name, value in values.items()}

    times = added(deep["metrics"], shallow["metrics"])
    return {
        "step": 1e3 * times["step_time_s"],
        "predicted": 1e3 * times["predicted_step_time_s"],
        "kernels": added(deep["kernel_ms"], shallow["kernel_ms"]),
        "launches": added(deep["launches"], shallow["launches"]),
    }


def depths(size: str) -> tuple[int, ...]:
    """Return the numbers of layers at which a model is measured."""
    return SEES[size][1] if size in SEES else SIZES[size][2]


def made_model(folder: Path, size: str, depth: int, device: torch.device) -> Path:
    """Return the folder of a model of this size with bf16 weights, drawn at random on the device on first use."""
    if (folder / "config.json").exists():
        return folder
    half = folder.with_name(f"{folder.name}-half-written")
    config = config_that_sees(half, size, depth) if size in SEES else text_config(size, depth)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = (AutoModelForImageTextToText if size in SEES else AutoModelForCausalLM).from_config(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(half)
    half.rename(folder)
    del model
    free_memory()
    return folder


def text_config(size: str, depth: int) -> Any:
    """Return the config of a Qwen3 of this size."""
    width, feed_forward, _, heads, kv_heads, head_width, vocabulary, tied = SIZES[size]
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_width,
        tie_word_embeddings=tied,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        dtype="bfloat16",
    )


def config_that_sees(folder: Path, size: str, depth: int) -> Any:
    """Write a processor for a model that sees; return its config, with a published tower and `depth` text layers."""
    from tests.zoo.media import MEDIA_FAMILIES, MROPE, QWEN_IDS
    from tests.zoo.processors import save_processor

    family, name = "qwen2_5_vl", SEES[size][0]
    fields = {**(SEEING[name].config if name else MEDIA_FAMILIES[family]), **QWEN_IDS, "dtype": "bfloat16"}
    rope = {"rope_parameters": {**MROPE, "mrope_section": [16, 24, 24]}} if name else {}
    fields["text_config"] = {**fields["text_config"], **rope, "num_hidden_layers": depth}
    processor = save_processor(family, folder)
    images = processor.image_processor
    images.patch_size = fields["vision_config"].get("patch_size", 14)
    images.size = {"shortest_edge": images.patch_size**2 * 16, "longest_edge": images.patch_size**2 * 16384}
    processor.save_pretrained(folder)
    return AutoConfig.for_model(family, **{name: value for name, value in fields.items() if name != "model_type"})


def row_media(part: Part, folder: Path) -> tuple[RowMedia, ...]:
    """Return the patches of the pictures of each row, as the planner counts them; () of rows of text."""
    if not part.pictures:
        return ()
    each = MediaProcessor(folder).num_patches(PICTURE[part.model])
    return (RowMedia(part.pictures * each, part.pictures * each, each),)


def with_pictures(part: Part, folder: Path, batch: Batch) -> Batch:
    """Return the batch with the part's pictures at the beginning of each row."""
    from PIL import Image

    processor, size = MediaProcessor(folder), PICTURE[part.model]
    tokens = torch.tensor(part.pictures * [WORD, *processor.token_ids(size)])  # pictures are separated by the word
    ids = batch.inputs.input_ids.clone()
    ids[torch.isin(ids, torch.tensor(sorted(processor.media_token_ids)))] = WORD
    ids[:, : len(tokens)] = tokens
    pictures = [[Image.new("RGB", size)] * part.pictures for _ in ids]
    return with_media(replace(batch, inputs=replace(batch.inputs, input_ids=ids)), pictures, processor)


def tried(part: Part, folder: Path, device: torch.device) -> dict[str, Any]:
    """Measure a training run under the part's layout; return why not if none fits or memory runs out."""
    shape, media = shape_of(ModelFacts(folder)), row_media(part, folder)
    candidates = layouts(part, shape, media, device)
    if len(candidates) <= part.place:
        return {"status": "skipped", "reason": "no layout is left that is predicted to fit"}
    chosen = candidates[part.place]
    try:
        return {"status": "measured", **measured(part, chosen, folder, shape, device)}
    except torch.OutOfMemoryError as error:
        predicted = f"{chosen.text}: predicted {chosen.memory.peak_gib:.1f} GiB"
        return {"status": "out of memory", "reason": f"{predicted}; {str(error).splitlines()[0]}"}


def measured(part: Part, chosen: Candidate, folder: Path, shape: ModelShape, device: torch.device) -> dict[str, Any]:
    """Train under one layout; return parameters, metrics and tags named as a train stage logs them to MLflow."""
    config = config_of(part, **chosen.layout.model_dump())
    workload = replace(config.workload, media=row_media(part, folder))
    start_s = time.perf_counter()
    program = plain_loop if part.program == "transformers" else engine
    steps, flops, close = program(part, config, folder, shape, device)
    ready_s = time.perf_counter() - start_s
    forget_peak_memory(device)
    first_s, *seconds = steps(WARMUP_STEPS + STEPS)
    seconds = seconds[WARMUP_STEPS - 1 :]
    step_s, peak = statistics.median(seconds), device_peak(device, torch.bfloat16)
    metrics = {
        "step_time_s": step_s,
        "tokens_per_s": part.rows * part.tokens / step_s,
        "model_tflops_per_s": flops / step_s / 1e12,
        "mfu": flops / step_s / peak.flops_per_s if peak else None,
        **memory(device),
        "predicted_step_time_s": chosen.time.step_time_s,
        "predicted_memory_gib": chosen.memory.peak_gib,
        "ready_s": ready_s,
        "first_step_s": first_s,
    }
    params = {f"layout.{name}": str(value) for name, value in config.layout.model_dump().items()}
    params |= {"engine": part.program, "global_batch_size": str(part.rows), "precision": part.precision}
    params |= {"method": "sft", "data.sequence_length": str(part.tokens)}
    tags = {"model_shape": shape.to_json(), "workload": workload.to_json(), "device": device.type}
    tags |= {"device_name": device_name(device) or "CPU"}
    predicted = {name: round(gib, 2) for name, gib in vars(chosen.memory.worst).items()}
    row = {"params": params, "metrics": metrics, "tags": tags, "predicted_gib": predicted, "steps_s": seconds}
    row |= profiled(steps, device)
    close()
    return row


def layouts(part: Part, shape: ModelShape, media: tuple[RowMedia, ...], device: torch.device) -> list[Candidate]:
    """Return the layouts predicted to fit in memory, fastest first; layouts with little memory to spare come last."""
    hardware = hardware_at_hand(device_name(device), 1, None)
    assert hardware, f"describe {device_name(device)} in stages/planner/hardware.py first"
    available = free_bytes(device) / GIB if device.type != "cpu" else hardware.memory_gib
    found = []
    choices = ("none", "full") if part.program == "megatron" else ("none", "selective", "full")
    for recompute in [part.recompute] if part.recompute else choices:
        for micro_batch_size in (rows for rows in (1, 2, 4) if (part.rows // 2) % rows == 0):
            config = config_of(part, recompute=recompute, micro_batch_size=micro_batch_size)
            workload = replace(config.workload, media=media)
            one = estimate(SearchRequest(shape, workload, hardware, 1), config.engine, config.layout)
            fit = memory_fit(one.memory.peak_gib, available)
            if fit != "does not fit":
                found.append((fit != "fits", one.time.step_time_s, one))
    return [one for *_, one in sorted(found, key=lambda entry: entry[:2])]


def engine(part: Part, config: TrainConfig, folder: Path, shape: ModelShape, device: torch.device) -> Program:
    """Return our FSDP or Megatron engine as a training program."""
    settings = replace(config.engine_settings, media=MediaSettings() if part.pictures else None)
    inputs = EngineInputs(ModelFacts(folder), settings, device, None, lambda _: [], folder, print)
    made: Any = BUILDERS[config.engine](inputs)
    rows = config.layout.micro_batch_size
    batches = [batch(shape.vocab_size, rows, part.tokens, part.documents) for _ in range(config.micro_batches_per_step)]
    if part.pictures:
        batches = [with_pictures(part, folder, one) for one in batches]
    lengths = [length for one in batches for length in one.documents.lengths]
    patches = [each for one in batches if one.inputs.media for each in one.inputs.media.patches]
    flops = made.flops.training(lengths, sum(lengths) - len(lengths), patches)
    return timed(lambda: made.train_step(batches, SftLoss(), 1e-5, 1.0), device), flops, made.close


def memory(device: torch.device) -> dict[str, float]:
    """Return the peak memory of the device in GiB: in use altogether, and allocated by tensors.

    The first is as the planner predicts it: the allocator's memory and what lies beside it (driver, libraries).
    """
    if device.type == "cpu":
        return {"peak_memory_gib": host_peak_bytes() / GIB}
    module: Any = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    beside = total - free - module.memory_reserved(device)
    return {
        "peak_memory_gib": (module.max_memory_reserved(device) + beside) / GIB,
        "peak_allocated_gib": peak_bytes(device) / GIB,
        "num_alloc_retries": module.memory_stats(device)["num_alloc_retries"],
    }


def profiled(steps: Steps, device: torch.device) -> dict[str, Any]:
    """Profile one training step; return kernels' milliseconds and launches by class, and the slowest kernels."""
    on_gpu = device.type == "cuda"
    kinds = [torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as profile:
        steps(1)
    of_event = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    events = sorted(((getattr(event, of_event), event) for event in profile.key_averages()), key=lambda one: -one[0])
    times: dict[str, float] = {}
    launches: dict[str, float] = {}
    for time_us, event in events:
        # Ranges such as `Optimizer.step` span kernels that are events themselves; launching takes the host's time.
        if event.is_user_annotation or not time_us:
            continue
        name = class_of(event.key)
        times[name] = times.get(name, 0) + time_us / 1e3
        launches[name] = launches.get(name, 0) + event.count
    slowest = [{"name": event.key[:120], "ms": us / 1e3, "calls": event.count} for us, event in events[:NUM_KERNELS]]
    return {"kernel_ms": times, "launches": launches, "kernels": slowest}


def class_of(kernel: str) -> str:
    """Return the class of a kernel by its name, such as `products`."""
    return next((name for name, words in CLASSES.items() if re.search(words, kernel, re.IGNORECASE)), "other")


if __name__ == "__main__":
    main()
