"""Benchmark of packed documents in a model that carries a state along the sequence: tokens/s against rows of their own.

Run: `PYTHONPATH=. python tests/benchmarks/mixers.py CHATS.json [--family mamba2]`, with chats in Alpaca's form.
A tiny model learns the chats by the engine `fsdp`, packed in rows, and each document a row of its own, padded to the
longest of the micro-batch, as it would be if its mixers could not be run apart. Both take the same documents, in turn,
step by step. Prints the medians of tokens/s, padding not counted, and of the steps' ratios. Aim: at least 2.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from workload import VOCABULARY

from stages.engines.fsdp import model as fsdp_model
from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.fsdp.probe import Verdict, packed
from stages.engines.settings import AdamSettings, EngineSettings
from stages.kinds.train.methods.sft import SftLoss
from stages.models.facts import ModelFacts
from stages.parallel.layout import Layout
from tests.zoo.models import tiny_model

HEAD_WIDTH = 16
FIELDS = {
    "qwen3_5_text": lambda width: {
        "intermediate_size": 3 * width,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
    },
    "lfm2": lambda width: {"intermediate_size": 3 * width, "layer_types": [*["conv"] * 3, "full_attention"]},
    "mamba2": lambda width: {"num_heads": 2 * width // HEAD_WIDTH, "head_dim": HEAD_WIDTH},
}
"""Fields of a model of each family, by its width; layers are mixed about as in the published models."""
WARMUP_STEPS = 2
LEARNING_RATE = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chats", type=Path, help="JSON file of chats in Alpaca's form")
    parser.add_argument("--family", choices=FIELDS, default="qwen3_5_text")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a step, at least (default: %(default)s)")
    parser.add_argument("--hidden-size", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(prefix="mixers-") as name:
        width = arguments.hidden_size
        fields = {"hidden_size": width, "num_hidden_layers": 4, **FIELDS[arguments.family](width)}
        tiny_model(arguments.family, vocab_size=VOCABULARY, **fields).save_pretrained(name)
        engines = [engine(Path(name), None), engine(Path(name), Verdict("eager", "documents are rows of their own"))]
        assert [one.tags["documents"] for one in engines] == ["packed", "rows"]
        steps = steps_of(arguments.chats, arguments.tokens, arguments.steps + WARMUP_STEPS)
        rates = [[rate(one, chats) for one in engines] for chats in steps][WARMUP_STEPS:]
    packs, rows = zip(*rates, strict=True)
    ratios = [one / other for one, other in rates]
    print(
        f"packed {statistics.median(packs):,.0f} tokens/s, rows of their own {statistics.median(rows):,.0f}; "
        f"median ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    torch.distributed.destroy_process_group()


def engine(folder: Path, verdict: Verdict | None) -> FsdpEngine:
    """Return a training engine. verdict: instead of the probe's."""
    probe = fsdp_model.probe
    if verdict:
        fsdp_model.probe = lambda *_, **unused: verdict
    try:
        settings = EngineSettings(Layout(), "fp32", AdamSettings(LEARNING_RATE))
        return FsdpEngine(ModelFacts(folder), settings, torch.device("cpu"))
    finally:
        fsdp_model.probe = probe


def steps_of(file: Path, num_tokens: int, number: int) -> list[list[torch.Tensor]]:
    """Return the token ids of the chats of each step, by a tokenizer trained on them, in the order of the file."""
    rows = json.loads(file.read_text())
    texts = ["\n".join(filter(None, [row["instruction"], row["input"], row["output"]])) for row in rows]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=VOCABULARY, show_progress=False)
    chats = [torch.tensor(tokenizer.encode(text).ids) for text in texts]
    steps: list[list[torch.Tensor]] = [[] for _ in range(number)]
    index = 0
    for chosen in steps:
        while sum(map(len, chosen)) < num_tokens:
            chosen.append(chats[index % len(chats)])
            index += 1
    return steps


def rate(trained: FsdpEngine, chats: list[torch.Tensor]) -> float:
    """Make a step; return its tokens a second of processor time."""
    start = time.process_time()
    trained.train_step([packed(chats)], SftLoss(), LEARNING_RATE, None)
    return sum(map(len, chats)) / (time.process_time() - start)


if __name__ == "__main__":
    main()
