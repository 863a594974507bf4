"""TRL's `SFTTrainer` on the benchmarks' model and chats; prints step times and peak memory as JSON on its last line.

    trl_sft.py ROOT STEPS [RANK]

With a rank, PEFT's LoRA of all linear layers learns. `workload.run_trl` starts it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer
from workload import ROWS_PER_STEP, SEQUENCE_LENGTH

from stages.kinds.train.metrics import GIB, forget_peak_memory, host_peak_bytes


class StepTimes(TrainerCallback):
    """Callback that measures the time from the end of one step to the end of the next, waiting for data included."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_train_begin(self, *arguments: Any, **_: Any) -> None:
        forget_peak_memory(torch.device("cpu"))
        self.ends_s.append(time.perf_counter())

    def on_step_end(self, *arguments: Any, **_: Any) -> None:
        self.ends_s.append(time.perf_counter())


def main() -> None:
    root, steps, *rank = Path(sys.argv[1]), *(int(argument) for argument in sys.argv[2:])
    chats = [json.loads(line)["messages"] for line in (root / "chats/data/train.jsonl").open()]
    rows = [{"prompt": messages[:1], "completion": messages[1:]} for messages in chats]
    times = StepTimes()
    trainer = SFTTrainer(
        model=str(root / "model/model"),
        args=settings(root, steps),
        train_dataset=Dataset.from_list(rows),
        callbacks=[times],
        peft_config=LoraConfig(r=rank[0], lora_alpha=2 * rank[0], target_modules="all-linear") if rank else None,
    )
    trainer.train()
    step_times_s = [end - start for start, end in zip(times.ends_s, times.ends_s[1:], strict=False)]
    print(json.dumps({"step_times_s": step_times_s, "peak_memory_gib": host_peak_bytes() / GIB}))


def settings(root: Path, steps: int) -> SFTConfig:
    """Return TRL settings that match the train stage's; recomputation, TRL's default, is off, since it costs time."""
    return SFTConfig(
        output_dir=str(root / "trl"),
        model_init_kwargs={"dtype": "float32"},
        max_length=SEQUENCE_LENGTH,
        packing=True,
        per_device_train_batch_size=ROWS_PER_STEP,
        max_steps=steps,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
