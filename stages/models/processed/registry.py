"""Registry of the kinds of media that processors take, in the order of `KINDS`."""

from typing import Any

from stages.models.media import MediaKind
from stages.models.processed.images import Images
from stages.models.processed.kind import ProcessedKind
from stages.models.processed.sounds import Sounds
from stages.models.processed.videos import Videos

PROCESSED: dict[MediaKind, type[ProcessedKind[Any]]] = {one.kind: one for one in (Images, Videos, Sounds)}
