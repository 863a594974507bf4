"""Pictures of rows and prompts: options that go with them, and their digests in the artifact's tags."""

import hashlib
from collections.abc import Collection, Iterable

from stages.core.errors import DataError
from stages.kinds.train.checks import picture_errors
from stages.kinds.train.config import TrainConfig
from stages.models.media import KINDS, NOUNS, MediaKind


def check_media(config: TrainConfig, kinds: Collection[MediaKind]) -> None:
    """Raise DataError for options of pictures without pictures, and for media that the recipe cannot train on.

    kinds: of the rows' media. Raises ServerError if the sampling server that the recipe names takes none.
    """
    if (config.freeze or config.part_learning_rates.named) and not kinds:
        field = "freeze" if config.freeze else "part_learning_rates"
        raise DataError(
            f"`{field}` names parts of a model that sees, and the rows have no pictures, so that only its language "
            f"model learns; remove `{field}`, or add rows with pictures"
        )
    if config.media.named and not kinds:
        raise DataError("`media` bounds pictures, and the rows have none; remove it, or add rows with pictures")
    if kinds and (problems := "; ".join(picture_errors(config))):
        raise DataError(f"the rows have pictures: {problems}")
    if config.media.sampling and "video" not in kinds:
        named = " and ".join(f"`media.{name}`" for name in config.media.sampling)
        raise DataError(f"{named}: the rows have no videos; remove it, or add rows with videos")
    if (others := {*kinds} - {"image"}) and (config.sampling or config.on_policy):
        noun = NOUNS[min(others, key=KINDS.index)]
        raise DataError(
            f"the rows have {noun}s, and `method: {config.method}` samples answers by a server, which is asked about "
            f"text and pictures alone; remove the rows with {noun}s, or the sampling"
        )
    if kinds and config.sampling and config.sampling.server:
        from stages.kinds.train.named_server import check_takes_pictures  # and aiohttp

        check_takes_pictures(config)


def media_tags(digests: Iterable[str]) -> dict[str, str]:
    """Return the tags of an artifact that learned from media with these digests; none without media."""
    if not (different := sorted(set(digests))):
        return {}
    content = hashlib.sha256("\n".join(different).encode()).hexdigest()
    return {"media_sha256": content, "different_media": str(len(different))}
