"""Media of rows and prompts: options that go with them, and what the artifact records of them."""

import hashlib
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from stages.core.errors import DataError
from stages.core.files import write_atomically
from stages.data.media_reference import MediaReference
from stages.kinds.train.checks import media_errors
from stages.kinds.train.config import TrainConfig
from stages.models.media import (
    DIFFERENT,
    KINDS,
    MEDIA_FILE,
    MEDIA_TAG,
    NOUNS,
    SHOWN_TO_ANY,
    TOWER_OF,
    MediaKind,
    in_words,
)

ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", "\r": r"\r"})
"""Characters of a path that would end its line; `sha256sum` writes and reads such a line with a backslash before it."""


def check_media(config: TrainConfig, kinds: Collection[MediaKind]) -> None:
    """Raise DataError for options of media without such media, and for media that the recipe cannot train on.

    kinds: of the rows' media. Raises ServerError if the sampling server that the recipe names takes none.
    """
    if (config.freeze or config.part_learning_rates.named) and not kinds:
        field = "freeze" if config.freeze else "part_learning_rates"
        raise DataError(
            f"`{field}` names parts of a model that sees or hears, and the rows have no media, so that only its "
            f"language model learns; remove `{field}`, or add rows with media"
        )
    if config.media.scaling and "vision_tower" not in {TOWER_OF[kind] for kind in kinds}:
        raise DataError("`media` bounds pictures, and the rows have none; remove it, or add rows with pictures")
    if kinds and (problems := "; ".join(media_errors(config, in_words(kinds)))):
        raise DataError(f"the rows have {in_words(kinds)}: {problems}")
    if config.media.sampling and "video" not in kinds:
        named = " and ".join(f"`media.{name}`" for name in config.media.sampling)
        raise DataError(f"{named}: the rows have no videos; remove it, or add rows with videos")
    if (others := {*kinds} - SHOWN_TO_ANY) and (config.sampling or config.on_policy):
        noun = NOUNS[min(others, key=KINDS.index)]
        raise DataError(
            f"the rows have {noun}s, and `method: {config.method}` samples answers by a server, which is asked about "
            f"text and pictures alone; remove the rows with {noun}s, or the sampling"
        )
    if kinds and config.sampling and config.sampling.server:
        from stages.kinds.train.named_server import check_takes_pictures  # and aiohttp

        check_takes_pictures(config)


def write_list(media: Collection[MediaReference], folder: Path) -> None:
    """List media by digest and path, as `sha256sum` does; nothing is written without media."""
    if media:
        write_atomically(folder / MEDIA_FILE, "".join(sorted(map(_line, media))))


def _line(medium: MediaReference) -> str:
    path = medium.path.translate(ESCAPED)
    return f"{'' if path == medium.path else chr(92)}{medium.sha256}  {path}\n"


def digest_of(media: Collection[MediaReference]) -> dict[str, str]:
    """Return the tag with the digest over the contents of all media, whatever their paths; none without media."""
    digests = sorted({medium.sha256 for medium in media})
    return {MEDIA_TAG: hashlib.sha256("\n".join(digests).encode()).hexdigest()} if digests else {}


def numbers_of(media: Collection[MediaReference]) -> dict[str, float]:
    """Return the number of different media of each kind that there is, as metrics."""
    contents = Counter(kind for kind, _ in {(medium.kind, medium.sha256) for medium in media})
    return {DIFFERENT[kind]: float(contents[kind]) for kind in KINDS if kind in contents}
