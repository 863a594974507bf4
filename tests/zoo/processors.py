"""Processors of the zoo's image-text families, with tokenizers whose ids of pictures are those of `media.py`.

Most need torchvision, which Transformers resizes pictures with.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tests.zoo.media import TOKENS
from tests.zoo.tokenizer import NUM_WORDS

QWEN_SIZE = {"patch_size": 8, "size": {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}}
GLM_SIZE = {"patch_size": 8, "size": {"shortest_edge": 2 * 32 * 32, "longest_edge": 2 * 128 * 128}}
SQUARE = {"size": {"height": 32, "width": 32}}
CROPPED = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
PINPOINTS = [[32, 64], [64, 32]]
CLIP_TEXT = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ ' ' + message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}PICTURE"
    "{% else %}{{ ' ' + part['text'] }}{% endif %}{% endfor %}{% endif %} n0{% endfor %}"
)


@dataclass(frozen=True)
class Names:
    """Tokens of a family by their names in `TOKENS`, and the tokenizer's attributes that its processor reads."""

    tokens: dict[str, str]
    attributes: dict[str, str] = field(default_factory=dict)
    """Name in `TOKENS` by the tokenizer's attribute."""
    picture: tuple[str, ...] = ("image",)
    """Names in `TOKENS` of what a chat template writes where a picture is."""


_WRAPPED = ("start", "image", "end")
QWEN = Names(
    {"image": "<|image_pad|>", "video": "<|video_pad|>", "start": "<|vision_start|>", "end": "<|vision_end|>"},
    {"image_token": "image", "video_token": "video", "vision_bos_token": "start", "vision_eos_token": "end"},
    _WRAPPED,
)
GLM = Names(
    {
        "image": "<|image|>",
        "video": "<|video|>",
        "start": "<|begin_of_image|>",
        "end": "<|end_of_image|>",
        "begin": "<|begin_of_video|>",
        "stop": "<|end_of_video|>",
    },
    {"image_token": "image", "video_token": "video"},
    _WRAPPED,
)
_GEMMA_TOKENS = {"image": "<image_soft_token>", "start": "<start_of_image>", "end": "<end_of_image>"}
_GEMMA = {"image_token": "image", "boi_token": "start", "eoi_token": "end"}
GEMMA_3 = Names(_GEMMA_TOKENS, _GEMMA, ("start",))
GEMMA_4 = Names(
    {**_GEMMA_TOKENS, "video": "<|video|>", "begin": "<audio_soft_token>", "stop": "<audio_border>"},
    {**_GEMMA, "audio_token": "begin", "boa_token": "stop", "eoa_token": "stop"},
)
LLAVA = Names({"image": "<image>", "video": "<video>"}, {"image_token": "image", "video_token": "video"})
INTERNVL = Names(
    {"image": "<IMG_CONTEXT>", "start": "<img>", "end": "</img>", "video": "<video>"},
    {"context_image_token": "image", "start_image_token": "start", "end_image_token": "end", "video_token": "video"},
)
IDEFICS = Names(
    {
        "image": "<image>",
        "start": "<fake_token_around_image>",
        "end": "<global-img>",
        "begin": "<end_of_utterance>",
        "video": "<video>",
    },
    {
        "image_token": "image",
        "fake_image_token": "start",
        "global_image_token": "end",
        "end_of_utterance_token": "begin",
        "video_token": "video",
    },
)
MISTRAL = Names(
    {"image": "[IMG]", "start": "[IMG_BREAK]", "end": "[IMG_END]"},
    {"image_token": "image", "image_break_token": "start", "image_end_token": "end"},
)
LLAMA = Names(
    {
        "image": "<|patch|>",
        "start": "<|image_start|>",
        "end": "<|image_end|>",
        "begin": "<|image|>",
        "stop": "<|tile_x_separator|>",
    },
    {"image_token": "begin"},
    ("begin",),
)
KIMI = Names(
    {
        "image": "<|media_pad|>",
        "video": "<|kimi_k25_video_placeholder|>",
        "start": "<|media_begin|>",
        "end": "<|media_end|>",
    },
    {"image_token": "image", "video_token": "video"},
    _WRAPPED,
)
LFM = Names(
    {"image": "<image>", "start": "<|image_start|>", "end": "<|image_end|>", "begin": "<|img_thumbnail|>"},
    {
        "image_token": "image",
        "image_start_token": "start",
        "image_end_token": "end",
        "image_thumbnail_token": "begin",
    },
)
QWEN_AUDIO = Names(
    {"image": "<|AUDIO|>", "start": "<|audio_bos|>", "end": "<|audio_eos|>"},
    {"audio_token": "image", "audio_bos_token": "start", "audio_eos_token": "end"},
    _WRAPPED,
)

Make = Callable[[Any], Any]
"""Function that makes a family's processor around a tokenizer."""


def _of(name: str, image: str, video: str | None = None, size: dict[str, Any] = QWEN_SIZE, **options: Any) -> Make:
    def make(tokenizer: Any) -> Any:
        parts = [getattr(transformers, image)(**size), tokenizer]
        parts += [getattr(transformers, video)(**size)] if video else []
        return getattr(transformers, name)(*parts, **options)

    return make


def _tiled(name: str, image: str, video: str | None = None, **options: Any) -> Make:
    size = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}

    def make(tokenizer: Any) -> Any:
        sampling = {"fps": 1, "max_frames": 8, "video_size": {"longest_edge": 32}}
        others = {"video_processor": getattr(transformers, video)(**size, video_sampling=sampling)} if video else {}
        made = getattr(transformers, image)(**size)
        return getattr(transformers, name)(made, tokenizer, image_seq_len=4, **others, **options)

    return make


def _gemma4(tokenizer: Any) -> Any:
    size = {"patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    sound, image, video = (
        getattr(transformers, f"Gemma4{name}") for name in ("AudioFeatureExtractor", "ImageProcessor", "VideoProcessor")
    )
    return transformers.Gemma4Processor(sound(), image(**size), tokenizer, video(**size), image_seq_length=70)


def _qwen2_audio(tokenizer: Any) -> Any:
    heard = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    return transformers.Qwen2AudioProcessor(heard, tokenizer)


_QWEN2_IMAGES, _QWEN2_VIDEOS = "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"
_QWEN3 = (QWEN, _of("Qwen3VLProcessor", _QWEN2_IMAGES, "Qwen3VLVideoProcessor"))
_OF_TILES = {**CROPPED, "image_grid_pinpoints": PINPOINTS}
_ONEVISION = {**SQUARE, "image_grid_pinpoints": PINPOINTS}
PROCESSORS: dict[str, tuple[Names, Make]] = {
    "qwen2_vl": (QWEN, _of("Qwen2VLProcessor", _QWEN2_IMAGES, _QWEN2_VIDEOS)),
    "qwen2_5_vl": (QWEN, _of("Qwen2_5_VLProcessor", _QWEN2_IMAGES, _QWEN2_VIDEOS)),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_5": _QWEN3,
    "gemma3": (GEMMA_3, _of("Gemma3Processor", "Gemma3ImageProcessor", size=SQUARE, image_seq_length=4)),
    "gemma4": (GEMMA_4, _gemma4),
    "paligemma": (LLAVA, _of("PaliGemmaProcessor", "SiglipImageProcessor", size={**SQUARE, "image_seq_length": 16})),
    "llava": (LLAVA, _of("LlavaProcessor", "CLIPImageProcessor", size=CROPPED, **CLIP_TEXT)),
    "llava_next": (LLAVA, _of("LlavaNextProcessor", "LlavaNextImageProcessor", size=_OF_TILES, **CLIP_TEXT)),
    "llava_onevision": (
        LLAVA,
        _of(
            "LlavaOnevisionProcessor",
            "LlavaOnevisionImageProcessor",
            "LlavaOnevisionVideoProcessor",
            _ONEVISION,
            num_image_tokens=16,
            vision_feature_select_strategy="full",
        ),
    ),
    "internvl": (
        INTERNVL,
        _of(
            "InternVLProcessor",
            "GotOcr2ImageProcessor",
            "InternVLVideoProcessor",
            {**SQUARE, "crop_to_patches": True, "max_patches": 4},
            image_seq_length=4,
        ),
    ),
    "idefics3": (IDEFICS, _tiled("Idefics3Processor", "Idefics3ImageProcessor")),
    "smolvlm": (IDEFICS, _tiled("SmolVLMProcessor", "SmolVLMImageProcessor", "SmolVLMVideoProcessor")),
    "mistral3": (
        MISTRAL,
        _of(
            "PixtralProcessor",
            "PixtralImageProcessor",
            size={"size": {"longest_edge": 128}, "patch_size": {"height": 8, "width": 8}},
            patch_size=8,
            spatial_merge_size=2,
        ),
    ),
    "llama4": (LLAMA, _of("Llama4Processor", "Llama4ImageProcessor", size={**SQUARE, "max_patches": 4}, patch_size=8)),
    "glm4v": (GLM, _of("Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor", GLM_SIZE)),
    "glm46v": (GLM, _of("Glm46VProcessor", "Glm46VImageProcessor", "Glm46VVideoProcessor", GLM_SIZE)),
    "kimi_k25": (
        KIMI,
        _of("Kimi_K25Processor", "Kimi_K25ImageProcessor", "Kimi_K25VideoProcessor", {"patch_size": 8}),
    ),
    "lfm2_vl": (
        LFM,
        _of(
            "Lfm2VlProcessor",
            "Lfm2VlImageProcessor",
            size={
                "encoder_patch_size": 8,
                "tile_size": 64,
                "min_image_tokens": 4,
                "max_image_tokens": 16,
                "do_image_splitting": False,
                "max_num_patches": 256,
            },
        ),
    ),
    "qwen2_audio": (QWEN_AUDIO, _qwen2_audio),
}
"""Names and maker of each family's processor."""


def save_processor(family: str, folder: Path) -> Any:
    """Write a family's processor, with its tokenizer and chat template, into a model's folder; return it."""
    names, make = PROCESSORS[family]
    words = {f"n{number}": number for number in range(NUM_WORDS)}
    special = {names.tokens[name]: number for name, number in TOKENS.items() if name in names.tokens}
    taken = {*special.values()}
    vocabulary = {word: number for word, number in words.items() if number not in taken} | special
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="n0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([*special])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="n0",
        eos_token="n0",
        pad_token="n0",
        extra_special_tokens={attribute: names.tokens[name] for attribute, name in names.attributes.items()},
    )
    processor = make(fast)
    processor.chat_template = TEMPLATE.replace("PICTURE", "".join(names.tokens[name] for name in names.picture))
    processor.save_pretrained(folder)
    return processor
