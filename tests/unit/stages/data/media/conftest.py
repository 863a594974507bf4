"""Fixtures with a tiny model folder whose processor reads pictures, a tokenizer of bytes, and pictures on disk."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma3ImageProcessor, Gemma3Processor, PreTrainedTokenizerFast

from stages.hubs.builtin import qwen3_vl
from tests.zoo.media import MEDIA_FAMILIES
from tests.zoo.models import tiny_config

SPECIAL = ["<pad>", "</s>", "<|im_start|>", "<|im_end|>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
BEGIN, END, PICTURE = SPECIAL[4:]
TEMPLATE = qwen3_vl.CHAT_TEMPLATE.replace(f"{qwen3_vl.START}{qwen3_vl.IMAGE}{qwen3_vl.END}", BEGIN)
NUM_TOKENS = 4
EXPANDED = f"\n\n{BEGIN}{PICTURE * NUM_TOKENS}{END}\n\n"
"""Text that Gemma's processor writes in place of a picture."""


@pytest.fixture(scope="session")
def seeing_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide the folder of a model, without weights, with a processor of pictures."""
    folder = tmp_path_factory.mktemp("seeing")
    write_processor(folder)
    tiny_config("gemma3", **config_fields(folder)).save_pretrained(folder)
    return folder


def byte_tokenizer(special: list[str], **named: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with special tokens. named: attributes of the tokenizer, each with its token."""
    vocabulary = {token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", extra_special_tokens=named
    )


def write_processor(folder: Path) -> None:
    """Write a tokenizer of bytes and a processor of pictures, of 4 tokens each, into a model's folder."""
    fast = byte_tokenizer(SPECIAL, boi_token=BEGIN, eoi_token=END, image_token=PICTURE)
    images = Gemma3ImageProcessor(size={"height": 32, "width": 32})
    processor = Gemma3Processor(images, fast, image_seq_length=NUM_TOKENS, chat_template=TEMPLATE)
    processor.save_pretrained(folder)


def config_fields(folder: Path) -> dict[str, Any]:
    """Return the fields of Gemma's config that go with the folder's tokenizer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = {**MEDIA_FAMILIES["gemma3"]["text_config"], "vocab_size": 300}
    names = {"boi_token_index": BEGIN, "eoi_token_index": END, "image_token_index": PICTURE}
    return {"text_config": text, **{name: tokenizer.token_to_id(token) for name, token in names.items()}}


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """Return a picture as the bytes of a file."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def noise(size: tuple[int, int] = (40, 24), seed: int = 0) -> Image.Image:
    """Return a picture of noise. size: (width, height) in pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8))


def video(
    size: tuple[int, int] = (64, 48), num_frames: int = 20, rate: int = 10, seed: int = 0, kind: str = "mp4"
) -> bytes:
    """Return a video of noise that moves as the bytes of a file. size: (width, height) in pixels, both even."""
    out, drawn = io.BytesIO(), np.random.default_rng(seed)
    still = np.asarray(Image.fromarray(drawn.integers(0, 255, (6, 8, 3), np.uint8)).resize(size))
    with av.open(out, "w", format=kind) as container:
        stream = container.add_stream("mpeg4", rate=rate, width=size[0], height=size[1], pix_fmt="yuv420p")
        for number in range(num_frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.roll(still, 3 * number, 1), format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def repeated_frame(size: tuple[int, int], num_frames: int, kind: str = "mpegts") -> bytes:
    """Return a video of one black frame, encoded once and written again and again; each can be decoded alone."""
    out = io.BytesIO()
    with av.open(out, "w", format=kind) as container:
        stream = container.add_stream("libx264", rate=30, width=size[0], height=size[1], pix_fmt="yuv420p")
        stream.options = {"preset": "ultrafast", "tune": "zerolatency"}
        black = np.zeros((size[1] * 3 // 2, size[0]), np.uint8)
        (packet,) = stream.encode(av.VideoFrame.from_ndarray(black, format="yuv420p"))
        for number in range(num_frames):
            packet.pts = packet.dts = number
            container.mux(packet)
    return out.getvalue()


def packed_frames(size: tuple[int, int], num_frames: int) -> bytes:
    """Return a video of two packets, of which the second, of 26 bytes a frame, holds all frames but the first."""
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as container:
        stream = container.add_stream("libx264", rate=30, width=size[0], height=size[1], pix_fmt="yuv420p")
        stream.options = {"preset": "ultrafast", "tune": "zerolatency", "x264-params": "annexb=1"}
        black = av.VideoFrame.from_ndarray(np.zeros((size[1] * 3 // 2, size[0]), np.uint8), format="yuv420p")
        first, second = (packet for _ in range(2) for packet in stream.encode(black))
        many = av.Packet(bytes(second) * (num_frames - 1))
        many.stream, many.time_base = stream, second.time_base
        for number, packet in enumerate((first, many)):
            packet.pts = packet.dts = number
            container.mux(packet)
    return out.getvalue()


def sound(
    seconds: float = 1.0, rate: int = 16000, channels: int = 1, seed: int = 0, kind: str = "WAV", **options: str
) -> bytes:
    """Return a sound of noise as the bytes of a file. rate: samples a second."""
    out, drawn = io.BytesIO(), np.random.default_rng(seed)
    noise = drawn.uniform(-0.5, 0.5, (round(seconds * rate), channels))
    soundfile.write(out, noise, rate, format=kind, **options)
    return out.getvalue()


@pytest.fixture
def pictures(tmp_path: Path) -> Callable[..., Path]:
    """Provide a function that writes pictures of noise, `a.png`, `b.png`, …, into a dataset's folder and returns it."""

    def write(*names: str) -> Path:
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        for seed, name in enumerate(names):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(noise(seed=seed)))
        return folder

    return write
