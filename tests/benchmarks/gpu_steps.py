"""Training programs that the GPU benchmark compares our engines with: a plain Transformers loop, and TRL's trainer."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu import Part
from transformers import AutoModelForCausalLM

from stages.data.batch import IGNORED, Batch, Documents
from stages.kinds.train.config import TrainConfig
from stages.models.shape import ModelShape
from stages.models.transformers_flops import model_flops

ADAPTER = {"rank": 16, "alpha": 32}
Steps = Callable[[int], list[float]]
"""Type of a function that runs the given number of optimizer steps and returns the seconds of each."""


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


def batch(vocabulary: int, rows: int, length: int) -> Batch:
    """Return a batch of random tokens on the host, as data preparation makes it, with one document in each row."""
    tokens = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))
    targets = torch.cat([tokens[:, 1:], torch.full((rows, 1), IGNORED)], dim=1)
    numbers = torch.arange(rows)[:, None].expand(-1, length)
    return Batch.of(tokens, targets, torch.arange(length).expand(rows, -1), Documents(numbers, rows, [length] * rows))


def loaded(part: Part, folder: Path, device: torch.device, recompute: bool) -> Any:
    """Load the model with Transformers, with PEFT's LoRA adapter if the run has one: then in bf16, as our engines."""
    dtype = torch.bfloat16 if part.adapter else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).train()
    if part.adapter:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=ADAPTER["rank"], lora_alpha=ADAPTER["alpha"], target_modules="all-linear")
        model = get_peft_model(model, lora)
        model.enable_input_require_grads()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def plain_loop(
    part: Part, config: TrainConfig, folder: Path, shape: ModelShape, device: torch.device
) -> tuple[Steps, float]:
    """Return a plain training loop (Transformers' loss, torch's autocast and AdamW) to time, and a step's FLOPs."""
    model = loaded(part, folder, device, config.layout.recompute != "none")
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

    return timed(step, device), flops


def trl(part: Part, config: TrainConfig, folder: Path, shape: ModelShape, device: torch.device) -> tuple[Steps, float]:
    """Return training steps of TRL's `SFTTrainer` to time, on rows of token ids, and a step's FLOPs."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from stages.hubs.builtin.qwen3 import make_tokenizer

    recompute = config.layout.recompute != "none"
    model = loaded(part, folder, device, recompute)
    tokens = batch(shape.vocab_size, part.rows, part.tokens).inputs.input_ids
    settings = SFTConfig(
        output_dir=str(folder / "trl"),
        max_length=part.tokens,
        per_device_train_batch_size=config.layout.micro_batch_size,
        gradient_accumulation_steps=config.micro_batches_per_step,
        max_steps=1,
        bf16=True,
        gradient_checkpointing=recompute,
        use_cpu=device.type == "cpu",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = Dataset.from_dict({"input_ids": tokens.tolist()})

    class Ends(TrainerCallback):
        """Callback that records the time when training starts and when each step ends."""

        def on_train_begin(self, *arguments: Any, **_: Any) -> None:
            self.times_s = [now_s(device)]

        def on_step_end(self, *arguments: Any, **_: Any) -> None:
            self.times_s.append(now_s(device))

    ends, tokenizer = Ends(), make_tokenizer()
    made = {"model": model, "args": settings, "train_dataset": rows, "processing_class": tokenizer}
    trainer = SFTTrainer(**made, callbacks=[ends])

    def steps(number: int) -> list[float]:
        trainer.args.max_steps = number
        trainer.train()
        return [end_s - start_s for start_s, end_s in pairwise(ends.times_s)]

    flops = model_flops(model).training([part.tokens] * part.rows, part.rows * (part.tokens - 1))
    return steps, flops
