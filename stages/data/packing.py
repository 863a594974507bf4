"""Documents → rows that hold as many of them as fit: best-fit decreasing, over a window so that memory stays flat.

Best-fit decreasing (Johnson 1973): the longest first, each into the row with the least room that it fits into.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stages.data.unit_arrays import Units

WINDOW_UNITS = 1 << 16
WINDOW_TOKENS = 1 << 22
WINDOW_ROWS = 256

PackedRows = tuple[Units, list[int]]
"""Units in the order of their rows, and how many of them each row has."""


def pack(batches: Iterable[Units], capacity: int) -> Iterator[PackedRows]:
    """Rows of units whose lengths add up to at most `capacity`, as full as they get; no unit is longer than that.

    At any time a window of units is held: the fuller three quarters of its rows are final, the others are packed
    again together with what comes next. How the units come in batches changes nothing.
    """
    window: list[Units] = []
    num_units = num_tokens = 0
    max_tokens = max(WINDOW_TOKENS, WINDOW_ROWS * capacity)
    for batch in batches:
        begin = 0
        while begin < len(batch):
            room = max(1, WINDOW_UNITS - num_units)
            end = min(_first_beyond(batch, begin, max_tokens - num_tokens), begin + room)
            window.append(batch if (begin, end) == (0, len(batch)) else batch.take(range(begin, end)))
            num_units += end - begin
            num_tokens += int(batch.lengths[begin:end].sum())
            begin = end
            if num_tokens < max_tokens and num_units < WINDOW_UNITS:
                continue
            units = Units.joined(window)
            rows = _fullest_first(units, capacity)
            num_final = (3 * len(rows) + 3) // 4
            yield _taken(units, rows[:num_final])
            window = [_taken(units, rows[num_final:])[0]]
            num_units, num_tokens = len(window[0]), int(window[0].lengths.sum())
    if num_units:
        units = Units.joined(window)
        yield _taken(units, _fullest_first(units, capacity))


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


def _first_beyond(batch: Units, begin: int, num_tokens: int) -> int:
    """The end of the units from `begin` on that have this many tokens or, by the last of them, more."""
    ends = batch.lengths[begin:].cumsum()
    return begin + min(int(ends.searchsorted(num_tokens)) + 1, len(ends))


def _fullest_first(units: Units, capacity: int) -> list[list[int]]:
    lengths = units.lengths.tolist()
    rows = best_fit_decreasing(lengths, capacity)
    rows.sort(key=lambda row: sum(lengths[number] for number in row), reverse=True)
    return rows


def _taken(units: Units, rows: list[list[int]]) -> PackedRows:
    return units.take([number for row in rows for number in row]), [len(row) for row in rows]
