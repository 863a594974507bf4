"""Proof that vLLM serves families' tiny models as Transformers computes them: many models in one process of vLLM."""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from stages.models.loading import class_with_head, load_config
from stages.serving.vllm.engine import find_vllm
from tests.zoo.table import YES, sentence

SERVED = "served"
"""Name of the column."""
PROGRAM = Path(__file__).with_name("vllm_program.py")
LARGEST_DIFFERENCE = 1e-5
"""Largest difference of log-probabilities in nats, in fp32."""
LENGTHS = (12, 7, 9)
START_S, MODEL_S = 300, 120
"""Seconds for vLLM's start and for each model, on a busy machine."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # models one after another in this very process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def served(folders: Mapping[str, Path]) -> dict[str, str]:
    """Return, by family, `yes` or why vLLM does not serve the model as Transformers computes it."""
    torch.manual_seed(0)
    rows = [torch.randint(1, 49, (length,)).tolist() for length in LENGTHS]
    families = {f"{folder}": family for family, folder in folders.items()}
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        rows_file, results_file = Path(name) / "rows.json", Path(name) / "results.jsonl"
        rows_file.write_text(json.dumps(rows))
        while left := [folder for folder in families if folder not in results]:
            ended = _run(rows_file, results_file, left)
            lines = [json.loads(line) for line in results_file.read_text().splitlines()]
            before = len(results)
            results |= {line["folder"]: line for line in lines if "folder" in line}
            begun = [line["begun"] for line in lines if "begun" in line and line["begun"] not in results]
            results |= {folder: {"reason": f"vLLM's process ended: {ended}"} for folder in begun}
            if len(results) == before:
                raise RuntimeError(f"vLLM began no model: {ended}")
    return {family: _outcome(folder, rows, results[folder]) for folder, family in families.items()}


def _run(rows_file: Path, results_file: Path, folders: list[str]) -> str:
    """Run the program over models; return how it ended, with its last words."""
    results_file.touch()
    command = [find_vllm().python, PROGRAM, rows_file, results_file, *folders]
    with (results_file.parent / "log").open("w+b") as log:
        try:
            done = subprocess.run(
                command, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log, check=False,
                timeout=START_S + MODEL_S * len(folders),
            )  # fmt: skip
            how = f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            how = "out of time"
        log.seek(0)
        said = log.read().decode(errors="replace").strip().splitlines()
    return f"{how}, {said[-1] if said else 'no output'}"


def _outcome(folder: str, rows: list[list[int]], result: dict[str, Any]) -> str:
    if "reason" in result:
        return sentence(str(result["reason"]).replace(folder, "the model"))
    pairs = zip(result["log_probabilities"], _expected(Path(folder), rows), strict=True)
    difference = max((torch.tensor(given) - expected).abs().max().item() for given, expected in pairs)
    return YES if difference <= LARGEST_DIFFERENCE else f"log-probabilities differ by {difference:.1g} nats"


@torch.no_grad()
def _expected(folder: Path, rows: list[list[int]]) -> list[torch.Tensor]:
    """Return each row's log-probabilities [tokens − 1] by Transformers' plain matrix products."""
    of_text = class_with_head(load_config(folder), "tokens") is not None
    auto_class: Any = AutoModelForCausalLM if of_text else AutoModelForImageTextToText
    model = auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logits = [model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1] for row in rows]
    return [
        one.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None]).squeeze(1)
        for one, row in zip(logits, rows, strict=True)
    ]
