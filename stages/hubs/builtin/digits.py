"""Dataset `builtin/digits`: pictures of two drawn digits, each with the question what number it is, and the number.

A picture has 32 × 16 pixels, 16 × 16 for each digit; size, place and slant of digits differ, as do shades and noise.
Pictures lie beside the rows as PNG files. Those of the lm-eval task `digits` (`configs/tasks`) are in no dataset.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stages.hubs.builtin.addition import message, write_rows

if TYPE_CHECKING:
    from PIL.Image import Image

Split = Literal["train", "validation", "test"]
NUM_ROWS: dict[Split, int] = {"train": 8000, "validation": 200, "test": 500}
NUM_DIGITS = 2
QUESTION = "What number is drawn?"
SIDE = 16
"""Width and height in pixels of a digit's part of a picture."""
NOISE = bytes(8 * (number % 4) for number in range(256))
"""Shade of the noise, one of four, by a random byte."""

FONT = """
 ### .  #  . ### .#####.   # .#####.  ## .#####. ### . ### .
#   #. ##  .#   #.   # .  ## .#    . #   .    #.#   #.#   #.
#  ##.  #  .    #.  #  . # # .#### .#    .   # .#   #.#   #.
# # #.  #  .   # .   # .#  # .    #.#### .  #  . ### . ####.
##  #.  #  .  #  .    #.#####.    #.#   #. #   .#   #.    #.
#   #.  #  . #   .#   #.   # .#   #.#   #. #   .#   #.   # .
 ### . ### .#####. ### .   # . ### . ### . #   . ### . ##  .
"""
"""Ten digits, 0 to 9, of 5 × 7 dots."""


@dataclass(frozen=True)
class Drawing:
    """Picture number `index` of a split, and the number that is drawn in it."""

    split: Split
    index: int

    @property
    def number(self) -> str:
        return "".join(self._random.choices("0123456789", k=NUM_DIGITS))

    @property
    def image(self) -> Image:
        """Picture in grey, the same whenever it is drawn."""
        from PIL import Image, ImageChops

        chance = self._random
        digits = chance.choices("0123456789", k=NUM_DIGITS)
        ground, ink = chance.randint(170, 250), chance.randint(0, 90)
        if chance.random() < 0.5:
            ground, ink = ink, ground
        picture = Image.new("L", (SIDE * NUM_DIGITS, SIDE), ground)
        for place, digit in enumerate(digits):
            picture.paste(ink, (SIDE * place, 0), _mask(digit, chance))
        noise = Image.frombytes("L", picture.size, chance.randbytes(SIDE**2 * NUM_DIGITS).translate(NOISE))
        return ImageChops.subtract(picture, noise)

    @property
    def png(self) -> bytes:
        stream = io.BytesIO()
        self.image.save(stream, "PNG")
        return stream.getvalue()

    @property
    def address(self) -> str:
        """Picture as a `data:` address."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"

    @property
    def _random(self) -> random.Random:
        return random.Random(f"{self.split} {self.index}")  # noqa: S311 - drawn, not secret


def drawings(split: Split) -> Iterator[Drawing]:
    """Yield the pictures of a split."""
    return (Drawing(split, index) for index in range(NUM_ROWS[split]))


def write_pictures(folder: Path, split: Split, num_rows: int | None = None) -> Iterator[tuple[Drawing, str]]:
    """Write a split's pictures, or the first of them, into a dataset's folder; yield each with its path there."""
    (folder / split).mkdir()
    for drawing in drawings(split):
        if drawing.index == num_rows:
            return
        path = f"{split}/{drawing.index}.png"
        (folder / path).write_bytes(drawing.png)
        yield drawing, path


def make(folder: Path) -> None:
    """Write the training and validation rows as chats, in JSON Lines files, with their pictures beside them."""
    for split in ("train", "validation"):
        write_rows(folder / f"{split}.jsonl", (_chat(drawing, path) for drawing, path in write_pictures(folder, split)))


def question() -> dict[str, object]:
    """Return the user's message: the next picture of the row, and the question."""
    return {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}


def _chat(drawing: Drawing, path: str) -> dict[str, object]:
    return {"messages": [question(), message("assistant", drawing.number)], "images": [path]}


def _mask(digit: str, chance: random.Random) -> Image:
    """Return how much ink is where in a digit's part of the picture, 0 to 255."""
    from PIL import Image

    width, height, slant = chance.uniform(1.2, 1.9), chance.uniform(1.4, 1.9), chance.uniform(-0.2, 0.2)
    left, top = SIDE / 2 + chance.uniform(-2, 2), SIDE / 2 + chance.uniform(-1.5, 1.5)
    # Of a pixel of the mask: where it is in the glyph, whose middle is at (left, top).
    across = (1 / width, slant, 3.5 - left / width - slant * top)
    down = (0, 1 / height, 4.5 - top / height)
    return _glyph(digit).transform((SIDE, SIDE), Image.Transform.AFFINE, (*across, *down), Image.Resampling.BILINEAR)


@cache
def _glyph(digit: str) -> Image:
    """Return a digit's dots with an empty border, beyond which nothing is sampled."""
    from PIL import Image

    lines = [line.split(".")[int(digit)] for line in FONT.strip("\n").split("\n")]
    glyph = Image.new("L", (7, 9))
    glyph.paste(Image.frombytes("L", (5, 7), bytes(255 * (dot == "#") for line in lines for dot in line)), (1, 1))
    return glyph
