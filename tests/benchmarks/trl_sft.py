"""TRL's `SFTTrainer` on the benchmarks' model and chats; prints step times and peak memory as JSON on its last line.

With a rank, PEFT's LoRA of all linear layers learns. `workload.run_trl` starts it.
"""

import argparse
import json
import time
from itertools import pairwise
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
    """Callback that notes when each step ends, and the processor time by then; waiting for data is in the steps."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.processor_s: list[float] = []

    def on_train_begin(self, *arguments: Any, **_: Any) -> None:
        forget_peak_memory(torch.device("cpu"))
        self._note()

    def on_step_end(self, *arguments: Any, **_: Any) -> None:
        self._note()

    def _note(self) -> None:
        self.ends_s.append(time.perf_counter())
        self.processor_s.append(time.process_time())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--sequence-length", type=int, default=SEQUENCE_LENGTH)
    parser.add_argument("--rows", type=int, default=ROWS_PER_STEP, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    root, rank = arguments.root, arguments.rank
    chats = [json.loads(line)["messages"] for line in (root / "chats/data/train.jsonl").open()]
    rows = [{"prompt": messages[:1], "completion": messages[1:]} for messages in chats]
    times = StepTimes()
    trainer = SFTTrainer(
        model=str(root / "model/model"),
        args=settings(arguments),
        train_dataset=Dataset.from_list(rows),
        callbacks=[times],
        peft_config=LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear") if rank else None,
    )
    trainer.train()
    step_times_s, step_processor_s = (
        [end - start for start, end in pairwise(noted)] for noted in (times.ends_s, times.processor_s)
    )
    peak_memory_gib = host_peak_bytes() / GIB
    print(
        json.dumps(
            {
                "step_times_s": step_times_s,
                "step_processor_s": step_processor_s,
                "peak_memory_gib": peak_memory_gib,
            }
        )
    )


def settings(arguments: argparse.Namespace) -> SFTConfig:
    """Return TRL settings that match the train stage's; recomputation, TRL's default, is off, since it costs time."""
    return SFTConfig(
        output_dir=str(arguments.root / "trl"),
        model_init_kwargs={"dtype": arguments.dtype},
        max_length=arguments.sequence_length,
        packing=True,
        per_device_train_batch_size=arguments.rows,
        gradient_accumulation_steps=arguments.micro_batches,
        max_steps=arguments.steps,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        bf16=arguments.dtype == "bfloat16",
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
