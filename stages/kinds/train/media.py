"""Pictures of rows and prompts: options that go with them, and their digests in the artifact's tags."""

import hashlib
from collections.abc import Iterable

from stages.core.errors import DataError
from stages.kinds.train.checks import picture_errors
from stages.kinds.train.config import TrainConfig


def check_media(config: TrainConfig, *, has_media: bool) -> None:
    """Raise DataError for options of pictures without pictures, and for pictures that the recipe cannot train on."""
    if (config.freeze or config.part_learning_rates.named) and not has_media:
        field = "freeze" if config.freeze else "part_learning_rates"
        raise DataError(
            f"`{field}` names parts of a model that sees, and the rows have no pictures, so that only its language "
            f"model learns; remove `{field}`, or add rows with pictures"
        )
    if config.media.named and not has_media:
        raise DataError("`media` bounds pictures, and the rows have none; remove it, or add rows with pictures")
    if has_media and (problems := "; ".join(picture_errors(config))):
        raise DataError(f"the rows have pictures: {problems}")


def media_tags(digests: Iterable[str]) -> dict[str, str]:
    """Return the tags of an artifact that learned from media with these digests; none without media."""
    if not (different := sorted(set(digests))):
        return {}
    content = hashlib.sha256("\n".join(different).encode()).hexdigest()
    return {"media_sha256": content, "different_media": str(len(different))}
