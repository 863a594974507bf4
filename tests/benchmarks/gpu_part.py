"""Measurement of one training run of the GPU benchmark, in a process of its own.

Run: `gpu_part.py PART RESULT MODELS DEVICE`.
PART is JSON (`Part`); RESULT is written when something is known; models of random weights are kept in MODELS. Rows hold
one document each, all of whose tokens are learned from, as the planner has it. A plain loop and TRL train in the same
precision (fp32 weights, bf16 products), with the same AdamW, and recompute what our engine recomputes.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpu import Part
from gpu_steps import ADAPTER, Steps, batch, plain_loop, timed, trl
from transformers import Qwen3Config, Qwen3ForCausalLM

from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.sft import SftLoss
from stages.kinds.train.metrics import GIB, forget_peak_memory, host_peak_bytes
from stages.models.facts import ModelFacts
from stages.models.shape import ModelShape
from stages.models.start_up import hide_unused_packages
from stages.parallel.accelerator import device_name, free_bytes, peak_bytes
from stages.parallel.devices import device_peak
from stages.parallel.processes import joined_processes
from stages.planner.costs import SearchRequest
from stages.planner.hardware import hardware_at_hand
from stages.planner.search import Candidate, estimate, memory_fit

SIZES = {  # of Qwen3: width, feed-forward width, layers, heads, key/value heads, head width, vocabulary, tied
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151936, True),
    "1.7b": (2048, 6144, 28, 16, 8, 128, 151936, True),
    "4b": (2560, 9728, 36, 32, 8, 128, 151936, True),
    "8b": (4096, 12288, 36, 32, 8, 128, 151936, False),
    "tiny": (64, 128, 2, 4, 2, 16, 512, True),
}
WARMUP_STEPS = 2
STEPS = 5
NUM_KERNELS = 12
"""Number of the slowest kernels that the profile of a training step reports."""


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
            "adapter": ADAPTER if part.adapter else None,
        }
    )


def main() -> None:
    part, result, models = Part(**json.loads(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    hide_unused_packages()
    with joined_processes() as device:
        if device.type != sys.argv[4]:
            raise SystemExit(f"{sys.argv[4]} was asked for, and torch found {device.type}")
        folder = made_model(models / part.model, part.model, device)
        row: dict[str, Any] = {"name": part.name, "part": asdict(part), "status": "measured"}
        shape = ModelFacts(folder).shape
        candidates = layouts(part, shape, device)
        if len(candidates) <= part.place:
            row |= {"status": "skipped", "reason": "no layout is left that is predicted to fit"}
        else:
            row |= tried(part, candidates[part.place], folder, shape, device)
        result.write_text(json.dumps(row))


def made_model(folder: Path, size: str, device: torch.device) -> Path:
    """Return the folder of a Qwen3 of this size with bf16 weights, drawn at random on the device on first use."""
    if (folder / "config.json").exists():
        return folder
    width, feed_forward, layers, heads, kv_heads, head_width, vocabulary, tied = SIZES[size]
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_width,
        tie_word_embeddings=tied,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    half = folder.with_name(f"{folder.name}-half-written")
    model.save_pretrained(half)
    half.rename(folder)
    return folder


def tried(part: Part, chosen: Candidate, folder: Path, shape: ModelShape, device: torch.device) -> dict[str, Any]:
    """Measure a training run under one layout; if memory runs out, return the error and the predicted memory."""
    try:
        return measured(part, chosen, folder, shape, device)
    except torch.OutOfMemoryError as error:
        predicted = f"{chosen.text}: predicted {chosen.memory.peak_gib:.1f} GiB"
        return {"status": "out of memory", "reason": f"{predicted}; {str(error).splitlines()[0]}"}


def measured(part: Part, chosen: Candidate, folder: Path, shape: ModelShape, device: torch.device) -> dict[str, Any]:
    """Train under one layout; return parameters, metrics and tags named as a train stage logs them to MLflow."""
    config = config_of(part, **chosen.layout.model_dump())
    start_s = time.perf_counter()
    program: Callable[..., tuple[Steps, float]] = {"transformers": plain_loop, "trl": trl}.get(part.program, engine)
    steps, flops = program(part, config, folder, shape, device)
    ready_s = time.perf_counter() - start_s
    forget_peak_memory(device)
    seconds = steps(WARMUP_STEPS + STEPS)[WARMUP_STEPS:]
    step_s, peak = statistics.median(seconds), device_peak(device, torch.bfloat16)
    tokens_per_s = part.rows * part.tokens / step_s
    metrics = {
        "step_time_s": step_s,
        "tokens_per_s": tokens_per_s,
        "model_tflops_per_s": flops / step_s / 1e12,
        "mfu": flops / step_s / peak.flops_per_s if peak else None,
        **memory(device),
        "predicted_step_time_s": chosen.time.step_time_s,
        "predicted_memory_gib": chosen.memory.peak_gib,
        "ready_s": ready_s,
    }
    params = {f"layout.{name}": str(value) for name, value in config.layout.model_dump().items()}
    params |= {"engine": part.program, "global_batch_size": str(part.rows), "precision": "bf16", "method": "sft"}
    params["data.sequence_length"] = str(part.tokens)
    tags = {"model_shape": shape.to_json(), "workload": config.workload.to_json(), "device": device.type}
    tags |= {"device_name": device_name(device) or "CPU"}
    kernels = profiled(steps, device)
    return {"params": params, "metrics": metrics, "tags": tags, "steps_s": seconds, "kernels": kernels}


def layouts(part: Part, shape: ModelShape, device: torch.device) -> list[Candidate]:
    """Return the layouts predicted to fit in memory, fastest first; layouts with little memory to spare come last."""
    hardware = hardware_at_hand(device_name(device), 1, None)
    assert hardware, f"describe {device_name(device)} in stages/planner/hardware.py first"
    available = free_bytes(device) / GIB if device.type != "cpu" else hardware.memory_gib
    found = []
    for recompute in ("none", "full") if part.program == "megatron" else ("none", "selective", "full"):
        for micro_batch_size in (rows for rows in (1, 2, 4) if (part.rows // 2) % rows == 0):
            config = config_of(part, recompute=recompute, micro_batch_size=micro_batch_size)
            one = estimate(SearchRequest(shape, config.workload, hardware, 1), config.engine, config.layout)
            fit = memory_fit(one.memory.peak_gib, available)
            if fit != "does not fit":
                found.append((fit != "fits", one.time.step_time_s, one))
    return [one for *_, one in sorted(found, key=lambda entry: entry[:2])]


def engine(
    part: Part, config: TrainConfig, folder: Path, shape: ModelShape, device: torch.device
) -> tuple[Steps, float]:
    """Load our FSDP or Megatron engine; return a function that runs training steps, and the FLOPs of one step."""
    if part.program == "megatron":
        from stages.engines.megatron.compat import prepare_megatron

        prepare_megatron()
        from stages.engines.megatron.engine import MegatronEngine

        made: Any = MegatronEngine(ModelFacts(folder), config.engine_settings, device)
    else:
        from stages.engines.fsdp.engine import FsdpEngine

        made = FsdpEngine(ModelFacts(folder), config.engine_settings, device)
    rows, length = config.layout.micro_batch_size, part.tokens
    batches = [batch(shape.vocab_size, rows, length) for _ in range(config.micro_batches_per_step)]
    flops = made.flops.training([length] * part.rows, part.rows * (length - 1))
    return timed(lambda: made.train_step(batches, SftLoss(), 1e-5, 1.0), device), flops


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
    }


def profiled(steps: Steps, device: torch.device) -> list[dict[str, Any]]:
    """Profile one training step; return the slowest kernels with their share of the time of all kernels."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) if device.type in ("cpu", "cuda") else nullcontext() as profile:
        steps(1)
    if profile is None:
        return []
    on_device = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = sorted(profile.key_averages(), key=lambda event: -getattr(event, on_device))
    total = sum(getattr(event, on_device) for event in events) or 1
    return [
        {"name": event.key[:120], "share": round(getattr(event, on_device) / total, 4), "calls": event.count}
        for event in events[:NUM_KERNELS]
    ]


if __name__ == "__main__":
    main()
