"""Proof that a method of quantization makes a family's tiny model smaller: by the quantize stage itself.

What vLLM's kernels take is not asked: that differs by device, and not by family.
"""

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from stages.core.contract import StageContext, StageResult
from stages.core.errors import RecipeError
from stages.kinds.quantize.config import QuantizeConfig
from stages.kinds.quantize.registry import METHODS
from stages.kinds.quantize.run import quantized, run
from stages.models.processor_files import reads_media
from tests.zoo.pictures import picture
from tests.zoo.table import YES
from tests.zoo.tokenizer import text_of

LARGEST_KL = {"awq": 0.05, "gptq": 0.05, "int8": 0.002, "fp8": 0.02, "gguf": 0.001}
"""Largest KL divergence from the unquantized model with random weights, in nats per token."""
SMALLEST_KL = 1e-9
IN_GROUPS = {"group_size": 32, "symmetric": True}  # experts are read without zero points
OPTIONS = {"awq": IN_GROUPS, "gptq": IN_GROUPS, "gguf": {"gguf_type": "q8_0"}}
NUM_ROWS, NUM_CALIBRATED = 24, 16
SIZES = ((64, 40), (48, 90))
"""Sizes of the rows' pictures, (width, height) in pixels, alternating."""


def quantizes(method: str, folder: Path) -> str:
    """Quantize the model: the stage finds all layers packed, and predictions that differ, by little."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for part in ("work", "model", "rows/data"):
            (root / part).mkdir(parents=True)
        (root / "model/model").symlink_to(folder)
        write_rows(root / "rows/data/train.jsonl", with_pictures=reads_media(folder))
        calibration = {"dataset": "rows", "num_samples": NUM_CALIBRATED, "num_evaluation_samples": NUM_ROWS}
        config = QuantizeConfig.model_validate(
            {"kind": "quantize", "model": "model", "method": method, "max_kl": LARGEST_KL[method],
             "calibration": calibration, **OPTIONS.get(method, {})}
        )  # fmt: skip
        inputs = {"model": root / "model", "rows": root / "rows"}
        context = StageContext(root / "work", "quantized", "0" * 12, inputs, leases={}, cache=root / "cache")
        metrics = _run(config, context).metrics
        if reads_media(folder) and not {"calibration_pictures", "vision_tower_tensors_kept"} <= metrics.keys():
            return "not calibrated with pictures, or without a tower"
        return YES if metrics["kl_nats_per_token"] > SMALLEST_KL else "nothing was changed"


def _run(config: QuantizeConfig, context: StageContext) -> StageResult:
    """Run the stage; where it refuses a model that vLLM has no kernels for on this device, quantize all the same."""
    try:
        result = run(config, context)
    except RecipeError:
        if METHODS[config.method].engine != "vllm":  # llama.cpp's are the same on all devices
            raise
        result = quantized(config, context)
    for finding in context.findings:
        raise finding
    return result


METHOD_COLUMNS: dict[str, Callable[[Path], str]] = {method: partial(quantizes, method) for method in METHODS}


def write_rows(path: Path, *, with_pictures: bool = False) -> None:
    """Write rows of random text, of token ids that are no pictures; with pictures, chats with one of noise each."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 16, (NUM_ROWS,), generator=generator).tolist()
    rows = [torch.randint(1, 49, (length,), generator=generator).tolist() for length in lengths]
    texts = [text_of(row) for row in rows]
    if not with_pictures:
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
        return
    for number in range(NUM_ROWS):
        picture(SIZES[number % 2], number).save(path.parent / f"{number}.png")
    chats = ([{"role": "user", "content": "n1"}, {"role": "assistant", "content": text}] for text in texts)
    seen = ({"messages": chat, "images": [f"{number}.png"]} for number, chat in enumerate(chats))
    path.write_text("\n".join(map(json.dumps, seen)))
