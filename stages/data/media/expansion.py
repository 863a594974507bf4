"""Expansion of a rendered chat: what a model's processor writes for each medium takes the place of its placeholder."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING

from stages.core.lines import counted
from stages.data.messages import Conversation, RowError
from stages.data.templates import Rendered
from stages.models.media import NOUNS, MediaError

if TYPE_CHECKING:
    from stages.models.processor import MediaProcessor


def expanded(rendered: Rendered, conversation: Conversation, processor: MediaProcessor) -> Rendered:
    """Return a rendered text with what the processor writes for its media, and the spans with loss moved accordingly.

    The text may end with an earlier turn than the conversation. Raises RowError if the placeholders do not match.
    """
    whole = conversation.media
    kinds = [kind for _, _, kind in processor.places(rendered.text)]
    media = whole[: len(kinds)]
    if unread := {one.kind for one in whole} - {*processor.placeholders.values()}:
        read = " and ".join(f"{NOUNS[kind]}s" for kind in processor.placeholders.values())
        raise RowError(f"has a {NOUNS[min(unread)]}, and the model reads text and {read} alone; take one that reads it")
    is_whole = len(kinds) in {len(whole), *conversation.num_media_before_turns().values()}
    if not is_whole or kinds != [one.kind for one in media]:
        found = " and ".join(
            counted(number, NOUNS[kind]) for kind, number in Counter(one.kind for one in whole).items()
        )
        raise RowError(
            f"has {found}, but the chat template writes {counted(len(kinds), 'placeholder')} "
            f"({', '.join(processor.placeholders)}); expected one for each: take the model's own chat template, and no "
            "placeholders in texts"
        )
    pieces: list[str] = []
    inserted: list[tuple[int, int]] = []
    num_characters = end = 0
    # Place in the rendered text from which on positions move, and by how much.
    moves = [(0, 0)]
    try:
        replacements = processor.replacements(rendered.text, [reference.size for reference in media])
    except MediaError as error:
        raise RowError(f"has media, of which one {error}") from error
    for replacement in replacements:
        pieces += (rendered.text[end : replacement.start], replacement.text)
        begin = num_characters + replacement.start - end
        num_characters = begin + len(replacement.text)
        inserted.append((begin, num_characters))
        moves.append((replacement.end, num_characters - replacement.end))
        end = replacement.end

    def moved(position: int) -> int:
        return position + moves[bisect_right(moves, position, key=itemgetter(0)) - 1][1]

    return replace(
        rendered,
        text="".join([*pieces, rendered.text[end:]]),
        spans=tuple((moved(begin), moved(last)) for begin, last in rendered.spans),
        media=media,
        inserted=tuple(inserted),
    )
