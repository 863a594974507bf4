"""Documents → rows that hold as many of them as fit: best-fit decreasing, over a window so that memory stays flat.

Best-fit decreasing (Johnson 1973): the longest first, each into the row with the least room that it fits into.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import TypeVar

WINDOW_UNITS = 1 << 16
WINDOW_TOKENS = 1 << 22
WINDOW_ROWS = 256

Unit = TypeVar("Unit", bound=Sized)


def pack(units: Iterable[Unit], capacity: int) -> Iterator[list[Unit]]:
    """Rows of units whose lengths add up to at most `capacity`, as full as they get; no unit is longer than that.

    At any time a window of units is held: the fuller three quarters of its rows are final, the others are packed
    again together with what comes next.
    """
    window: list[Unit] = []
    window_tokens = 0
    max_tokens = max(WINDOW_TOKENS, WINDOW_ROWS * capacity)
    for unit in units:
        window.append(unit)
        window_tokens += len(unit)
        if window_tokens >= max_tokens or len(window) >= WINDOW_UNITS:
            rows = _fullest_first(window, capacity)
            num_final = (3 * len(rows) + 3) // 4
            yield from rows[:num_final]
            window = [unit for row in rows[num_final:] for unit in row]
            window_tokens = sum(map(len, window))
    yield from _fullest_first(window, capacity)


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of indices into `lengths`. O(n log n) for sorting, and per unit a search in `capacity` bits."""
    rows: list[list[int]] = []
    rows_by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # a bit for each amount of room that some row has
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[index]
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                rooms ^= 1 << room
            rows[row].append(index)
        else:
            room, row = capacity, len(rows)
            rows.append([index])
        rows_by_room[room - length].append(row)
        rooms |= 1 << (room - length)
    return rows


def _fullest_first(units: list[Unit], capacity: int) -> list[list[Unit]]:
    rows = [[units[index] for index in row] for row in best_fit_decreasing(list(map(len, units)), capacity)]
    rows.sort(key=lambda row: sum(map(len, row)), reverse=True)
    return rows
