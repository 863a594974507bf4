"""Test program that trains models that see on one or two processes, of which the second has no pictures.

    pictures_program OUTPUT few|all|split|kinds|sounds|experts|adapters FOLDER …

Each folder's model is trained whole and with frozen parts, with and without recomputation, and by GRPO on completions
of prompts with pictures. OUTPUT is a JSON file with loss and norm of the gradients of each step, by case. With `kinds`,
one process has pictures and the other videos. With `sounds`, one has sounds and the other text.
With `experts`, each has a part of them. With `split`, each has a part of the text's matrices, and so with `adapters`,
which learn then, of tower and text.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.adapters.config import AdapterConfig
from stages.core.contract import is_main_process
from stages.data.batch import Batch
from stages.data.media.folder import MediaFolder
from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.fsdp.packed import packed
from stages.engines.media import with_media
from stages.engines.settings import AdamSettings, EngineSettings, MediaSettings
from stages.kinds.train.methods.grpo import GrpoConfig, GrpoLoss
from stages.kinds.train.methods.sft import SftLoss
from stages.kinds.train.rollouts.documents import AnsweredPrompt, Packing
from stages.models.facts import ModelFacts
from stages.models.media import KINDS, MediaSize, Medium, SoundSize, VideoSize, kind_of
from stages.models.processor import MediaProcessor
from stages.parallel.layout import Layout
from stages.parallel.processes import joined_processes
from stages.rollouts.pictures import PromptPictures
from tests.zoo.pictures import Documents

NUM_STEPS = 2
"""Number of steps: AdamW's first update has one size whatever the gradient's, so that rounding shows soon after."""
SHARES = (((0,), (2,)), ((1,), (1,)))
SHARES_OF_KINDS = (((0,), (1,)), ((2,), (0, 2)))
"""Documents of each micro-batch of the two processes: the second has those without a picture."""


SIZES = {
    "kinds": (((64, 40),), (), (VideoSize(48, 64, 12, 3.0),)),
    "sounds": ((SoundSize(8000, 16000),), (), (SoundSize(3000, 8000), SoundSize(22050, 22050))),
}
"""Sizes of three documents' media."""
TOWER, SEEING = ("vision_tower",), ("vision_tower", "projector")
CASES = {
    "few": [((), "none"), (TOWER, "full")],
    "split": [((), "none"), (TOWER, "full")],
    "kinds": [((), "none"), (TOWER, "full")],
    "experts": [((), "none"), (TOWER, "full")],
    "sounds": [((), "none"), (("audio_tower",), "full"), (("projector",), "full")],
    "all": [*product(((), TOWER), ("none", "full")), (SEEING, "none"), (("language_model",), "full")],
}
"""Frozen parts and recomputation of each training."""
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {},
    "lengths": {"use_dora": True},
    "some": {"target_modules": ["q_proj", "down_proj"]},
}
"""Options of adapters that are trained on split matrices, beside whole towers."""


def main() -> None:
    torch.set_num_threads(1)
    _, output, cases, *folders = sys.argv
    results = {}
    with joined_processes() as device:
        for folder, name in product(map(Path, folders), ADAPTERS if cases == "adapters" else ()):
            adapter = AdapterConfig(rank=4, alpha=8, **ADAPTERS[name])
            results[f"{folder.name}, {name}"] = train(folder, (), layout(cases, "full"), device, None, adapter)
        for folder, (frozen, recompute) in product(map(Path, folders), CASES.get(cases, ())):
            found = train(folder, frozen, layout(cases, recompute), device, SIZES.get(cases))
            results[f"{folder.name}, frozen {' '.join(frozen)}, recompute {recompute}"] = found
        if cases in CASES and cases not in SIZES:
            results |= {
                f"{folder.name}, GRPO": reinforce(folder, layout(cases), device) for folder in map(Path, folders)
            }
    if is_main_process():
        Path(output).write_text(json.dumps(results))


def layout(cases: str, recompute: Any = "none") -> Layout:
    """Return the layout of a training on all processes."""
    size = torch.distributed.get_world_size()
    tp = min(size, 2) if cases in ("split", "adapters") else 1
    return Layout(dp_shard=size // tp, tp=tp, ep=size if cases == "experts" else 1, recompute=recompute)


def reinforce(folder: Path, layout: Layout, device: torch.device) -> list[tuple[float, float]]:
    """Return loss and norm of the gradients of steps of GRPO on two completions of each of three prompts.

    They are dealt to the processes with the pictures of their prompts, of which one has none.
    """
    documents = Documents(folder)
    settings = EngineSettings(layout, "fp32", AdamSettings(1e-3), media=MediaSettings())
    engine = FsdpEngine(ModelFacts(folder), settings, device)
    for number, image in enumerate(one for images in documents.pictures for one in images):
        image.save(output := folder / f"{torch.distributed.get_rank()}-{number}.png")
    media = MediaFolder.of(output.parent, ())
    names = iter(f"{torch.distributed.get_rank()}-{number}.png" for number in range(3))
    shown = [tuple(media.reference("image", next(names), None) for _ in images) for images in documents.pictures]
    completions = [
        AnsweredPrompt(
            documents.ids[number % 3].tolist(), [5 + number, 9, 12 - number], [-4.0] * 3, 0.5 - number % 2,
            pictures=PromptPictures([], shown[number % 3], media) if shown[number % 3] else None,
        )
        for number in range(6)
    ]  # fmt: skip
    packing = Packing(128, 128, True, 1, 0, processor=documents.processor)
    packed_answers = packing.share(completions, engine.data_rank, engine.data_parallel_size)
    batches = []
    for one in packed_answers:
        batch = one.seen()
        rollouts = replace(batch.signal.rollouts, old_log_probabilities=engine.target_log_probabilities(batch))
        batches.append(batch.with_signal(rollouts=rollouts))
    loss = GrpoLoss(GrpoConfig(importance_sampling_correction=False))
    steps = [engine.train_step(batches, loss, 1e-3, None) for _ in range(NUM_STEPS)]
    engine.close()
    return [(step.loss, step.grad_norm) for step in steps]


class Drawn:
    """Three documents with drawn media of these sizes."""

    def __init__(self, folder: Path, sizes: Sequence[Sequence[MediaSize]]) -> None:
        self.processor = MediaProcessor(folder)
        self.sizes = sizes

    def batch(self, chosen: tuple[int, ...]) -> Batch:
        """Return a batch of one row with the chosen documents."""
        ids, media = zip(*map(self._document, chosen), strict=True)
        return with_media(packed(ids), media, self.processor)

    def inputs(self, number: int) -> dict[str, Tensor]:
        """Return the arguments with which Transformers' model reads one document."""
        ids, media = self._document(number)
        return self.processor.inputs(ids.tolist(), media)

    def _document(self, number: int) -> tuple[Tensor, list[Medium]]:
        own = [token for size in self.sizes[number] for token in self.processor.token_ids(size)]
        ids = torch.tensor([*range(8 + number, 14), *own, *range(20 - number, 26)])
        return ids, [self.processor.drawn(size, number) for size in self.sizes[number]]


def train(
    folder: Path,
    frozen: tuple[str, ...],
    layout: Layout,
    device: torch.device,
    sizes: Sequence[Sequence[MediaSize]] | None,
    adapter: AdapterConfig | None = None,
) -> list[tuple[float, float]]:
    """Return loss and norm of the gradients of each step. sizes: of three documents' media; None: pictures."""
    found = {kind_of(size) for own in sizes or () for size in own}
    media = MediaSettings(frozen, kinds=[kind for kind in KINDS if kind in found] or ("image",))
    settings = EngineSettings(layout, "fp32", AdamSettings(1e-3), adapter=adapter, media=media)
    engine = FsdpEngine(ModelFacts(folder), settings, device)
    documents = Drawn(folder, sizes) if sizes else Documents(folder)
    dealt = SHARES_OF_KINDS if len(found) > 1 else SHARES
    shares = [share for own in dealt for share in own] if engine.data_parallel_size == 1 else dealt[engine.data_rank]
    batches = [documents.batch(share) for share in shares]
    steps = [engine.train_step(batches, SftLoss(), 1e-3, None) for _ in range(NUM_STEPS)]
    engine.close()
    return [(step.loss, step.grad_norm) for step in steps]
