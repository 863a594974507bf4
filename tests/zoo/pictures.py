"""Documents with pictures for a family's tiny model, and what plain Transformers makes of each of them alone."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM, modeling_outputs

from stages.data.batch import IGNORED, Batch
from stages.engines.fsdp.packed import packed
from stages.engines.media import with_media
from stages.models.facts import ModelFacts
from stages.models.media import TOWER_OF, MediaSize, SoundSize, kind_of
from stages.models.processor import MediaProcessor
from stages.models.walked import shape_of
from tests.zoo.media import MEDIA_FAMILIES
from tests.zoo.models import tiny_model
from tests.zoo.planning import keep_shape
from tests.zoo.processors import save_processor

PICTURES = (((40, 40),), (), ((64, 40), (48, 90)))
"""Sizes of the pictures of three documents: one, none, and two of other sizes."""
# In Transformers 5.24, Llama 4 asks its language model's output for this field of its own, which is not there.
modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None
MODEL_INPUTS = ("attention_mask", "mm_token_type_ids", "token_type_ids")


def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """Return a picture of noise. size: (width, height) in pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8))


def save_family(family: str, folder: Path) -> Path:
    """Write a family's tiny model with its processor; return the folder."""
    tiny_model(family).save_pretrained(folder)
    save_processor(family, folder)
    return folder


def save_hearing(family: str, folder: Path) -> Path:
    """Write a family's tiny model that hears, with its processor; return the folder."""
    heard = {"subsampling_conv_channels": [128, 4], "output_proj_dims": 32, "use_clipped_linears": False}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    # Families that see are tiny without a tower of sounds.
    model = tiny_model(family, audio_config={**sizes, **heard}) if family in MEDIA_FAMILIES else tiny_model(family)
    model.save_pretrained(folder)
    save_processor(family, folder)
    return folder


class Documents:
    """Three documents: one with a picture, one without, one with two pictures of other sizes."""

    def __init__(self, folder: Path) -> None:
        """Read the folder's processor, and write the documents for it."""
        self.processor = MediaProcessor(folder)
        self._reference = self.processor._processor
        self.pictures = [
            [picture(size, 3 * row + at) for at, size in enumerate(row_)] for row, row_ in enumerate(PICTURES)
        ]
        self.texts = [self._text(len(images), number) for number, images in enumerate(self.pictures)]
        self.ids = [self._ids(text, images) for text, images in zip(self.texts, self.pictures, strict=True)]

    def batch(self, chosen: tuple[int, ...] = (0, 1, 2)) -> Batch:
        """Return a batch of one row with the chosen documents; tokens of pictures are no targets."""
        batch = packed([self.ids[number] for number in chosen])
        targets = batch.signal.targets
        for token in self.processor.media_token_ids:
            targets = targets.masked_fill(targets == token, IGNORED)
        return with_media(
            batch.with_signal(targets=targets), [self.pictures[number] for number in chosen], self.processor
        )

    def alone(self, model: Any, number: int) -> Tensor:
        """Return the logits [1, tokens, vocabulary] that Transformers' model gives one document of its processor."""
        given = self._call(self.texts[number], self.pictures[number], return_mm_token_type_ids=True)
        assert given["input_ids"][0].tolist() == self.ids[number].tolist()
        logits: Tensor = model(**given, use_cache=False).logits
        return logits

    def _call(self, text: str, images: list[Image.Image], **options: Any) -> dict[str, Any]:
        given = self._reference(
            text=[text], images=[images] if images else None, return_tensors="pt", add_special_tokens=False, **options
        )
        return {
            name: value.float() if value.is_floating_point() else value
            for name, value in given.items()
            if name in self.processor._arguments or name in ("input_ids", "mm_token_type_ids", "token_type_ids")
        }

    def _text(self, num_pictures: int, number: int) -> str:
        words = [f"n{1 + (7 * number + one) % 49}" for one in range(12)]
        return self._reference.apply_chat_template(  # type: ignore[no-any-return]
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": " ".join(words[:4])},
                        *({"type": "image"} for _ in range(num_pictures)),
                        {"type": "text", "text": " ".join(words[4:])},
                    ],
                }
            ],
            tokenize=False,
        )

    def _ids(self, text: str, images: list[Image.Image]) -> Tensor:
        replaced = text
        for one in reversed(self.processor.replacements(text, [image.size for image in images])):
            replaced = replaced[: one.start] + one.text + replaced[one.end :]
        return torch.tensor(self.processor._tokens(replaced))


def tower_error(folder: Path, size: MediaSize) -> float:
    """Return by what share the planner's FLOPs of a medium differ from those that torch counts."""
    keep_shape(folder)
    processor, shape = MediaProcessor(folder), shape_of(ModelFacts(folder))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    features = processor.merged([processor.features([processor.drawn(size)])])
    tower = model.get_video_features if kind_of(size) == "video" else model.get_image_features
    asked = inspect.signature(tower).parameters
    given = {name: features.get(name) for name in asked if name in features or asked[name].default is asked[name].empty}
    given.pop("kwargs", None)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tower(**given)
    (of_kind,) = (one for one in shape.towers if one.part == TOWER_OF[kind_of(size)])
    return of_kind.flops().forward(processor.patches(size)) / counter.get_total_flops() - 1


def hearing_error(folder: Path, size: SoundSize) -> float:
    """Return by what share the planner's FLOPs of a sound differ from torch's, counted in tower and projector."""
    keep_shape(folder)
    processor, shape = MediaProcessor(folder), shape_of(ModelFacts(folder))
    model = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    given = processor.inputs(processor.token_ids(size), [processor.drawn(size)])
    (heard,) = (one for one in shape.towers if one.part == "audio_tower")
    # Other modules are of the text.
    names = [
        name
        for name, _ in model.named_modules()
        if name.endswith((".audio_tower", ".multi_modal_projector", ".embed_audio"))
    ]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**given)
    found = sum(sum(counter.get_flop_counts()[f"{type(model).__name__}.{name}"].values()) for name in names)
    return heard.flops().forward(processor.patches(size)) / found - 1


def load_seeing(folder: Path) -> Any:
    """Return a folder's model as Transformers' plain matrix products compute it, in fp32."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def log_probabilities(model: Any, documents: Documents, batch: Batch) -> Tensor:
    """Return the targets' log-probabilities [1, tokens] of the documents, each alone in Transformers."""
    logits = torch.cat([documents.alone(model, number) for number in range(len(PICTURES))], dim=1)
    targets = batch.signal.targets.clamp(min=0)[..., None]
    return logits.log_softmax(-1).gather(2, targets).squeeze(2) * batch.signal.has_target
