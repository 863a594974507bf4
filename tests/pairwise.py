"""Choice of few test cases that cover every pair of parameter values, for `make test`; others are `nightly`.

It depends on the cases and their order alone.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any

Pair = frozenset[tuple[str, Hashable]]


def pairwise(cases: Sequence[Any], values_of: Callable[[Any], Mapping[str, Hashable]]) -> list[Any]:
    """Return a subset of test cases that still covers every pair of parameter values found in any case.

    values_of: case → value by axis. Greedy: the first case with the most pairs that no chosen one has.
    """
    pairs = [_pairs(values_of(case)) for case in cases]
    missing = set().union(*pairs)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(pairs[index] & missing))
        chosen.add(best)
        missing -= pairs[best]
    needed = sorted(chosen)
    for index in sorted(chosen):  # the first ones were chosen before it was known what the others bring
        others = set().union(*(pairs[other] for other in needed if other != index))
        if pairs[index] <= others:
            needed.remove(index)
    return [cases[index] for index in needed]


def _pairs(values: Mapping[str, Hashable]) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(values.items(), 2)}
