"""TRL's `GRPOTrainer` with its own generation, on the benchmarks' model; prints seconds of each step as JSON.

`grpo_against_trl.py` starts it.
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl_sft import StepTimes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--completions", type=int, required=True)
    parser.add_argument("--generations", type=int, required=True)
    parser.add_argument("--completion-tokens", type=int, required=True)
    arguments = parser.parse_args()
    rows = [json.loads(line)["messages"] for line in (arguments.root / "chats/data/train.jsonl").open()]
    times = StepTimes()
    trainer = GRPOTrainer(
        model=str(arguments.root / "model/model"),
        args=settings(arguments),
        reward_funcs=has_an_e,
        train_dataset=Dataset.from_list([{"prompt": messages[:1]} for messages in rows]),
        callbacks=[times],
    )
    trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    step_times_s = [end - start for start, end in pairwise(times.ends_s)]
    print(json.dumps({"step_times_s": step_times_s, "mean_lengths": lengths}))


def has_an_e(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    return [float("e" in completion[-1]["content"]) for completion in completions]


def settings(arguments: argparse.Namespace) -> GRPOConfig:
    """Return TRL settings that match the train stage's: one update a round, no reference, AdamW in fp32."""
    return GRPOConfig(
        output_dir=str(arguments.root / "trl"),
        model_init_kwargs={"dtype": "float32"},
        num_generations=arguments.generations,
        max_completion_length=arguments.completion_tokens,
        per_device_train_batch_size=arguments.completions,
        max_steps=arguments.steps,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
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
