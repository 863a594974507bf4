"""Batches and timing of the GPU benchmark, and the plain Transformers loop that it compares our engines with."""

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu import Part
from transformers import AutoModelForCausalLM

from stages.data.batch import IGNORED, Batch, Documents
from stages.engines.engine import free_memory
from stages.kinds.train.config import TrainConfig
from stages.models.shape import ModelShape
from stages.models.transformers_flops import model_flops

ADAPTER = {"rank": 16, "alpha": 32}
Steps = Callable[[int], list[float]]
"""Type of a function that runs the given number of optimizer steps and returns the seconds of each."""
Program = tuple[Steps, float, Callable[[], None]]
"""Type of a training program that is ready: its steps, the FLOPs of one, and a function that frees its memory."""


def timed(step: Callable[[], Any], device: torch.device) -> Steps:
    """Return a function that runs several training steps and times each, waiting for the device after every step."""

    def steps(number: int) -> list[float]:
        times_s = [now_s(device)]
        for _ in range(number):
            step()
            times_s.append(now_s(device))
        return [end_s - start_s for start_s, end_s in pairwise(times_s)]

    return steps


def now_s(device: torch.device) -> float:
    """Wait until the device has done all queued work, and return the time in seconds."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def batch(vocabulary: int, rows: int, length: int, documents: int = 1) -> Batch:
    """Return a batch of random tokens on the host, as data preparation makes it, with documents of uneven lengths."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (rows, length), generator=random)
    # [rows, documents - 1]: places in a row, but its ends, where a document ends and the next begins
    cuts = torch.stack([torch.randperm(length - 1, generator=random)[: documents - 1].sort()[0] for _ in range(rows)])
    is_first = torch.zeros(rows, length, dtype=torch.bool)
    is_first[:, 0] = True
    is_first[torch.arange(rows)[:, None], cuts + 1] = True
    numbers = is_first.flatten().cumsum(0) - 1
    lengths = numbers.bincount()
    positions = torch.arange(rows * length) - (lengths.cumsum(0) - lengths)[numbers]
    is_last = is_first.roll(-1, 1)
    targets = tokens.roll(-1, 1).masked_fill(is_last, IGNORED)
    described = Documents(numbers.view(rows, length), rows * documents, lengths.tolist())
    return Batch.of(tokens, targets, positions.view(rows, length), described)


def loaded(part: Part, folder: Path, device: torch.device, recompute: bool) -> Any:
    """Load the model with Transformers, with PEFT's LoRA adapter if the run has one: then in bf16, as our engines."""
    dtype = torch.bfloat16 if "LoRA" in part.learns else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).train()
    if "LoRA" in part.learns:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=ADAPTER["rank"], lora_alpha=ADAPTER["alpha"], target_modules="all-linear")
        model = get_peft_model(model, lora)
        model.enable_input_require_grads()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def plain_loop(part: Part, config: TrainConfig, folder: Path, shape: ModelShape, device: torch.device) -> Program:
    """Return a plain training loop: Transformers' loss, torch's autocast and AdamW."""
    model = loaded(part, folder, device, config.layout.recomputes)
    flops = model_flops(model).training([part.tokens] * part.rows, part.rows * (part.tokens - 1))
    parameters = [one for one in model.parameters() if one.requires_grad]
    adam = torch.optim.AdamW(parameters, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    tokens = batch(shape.vocab_size, config.layout.micro_batch_size, part.tokens).inputs.input_ids.to(device)

    def step() -> None:
        for _ in range(config.micro_batches_per_step):
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            (loss / config.micro_batches_per_step).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
        adam.zero_grad()

    return timed(step, device), flops, free_memory
