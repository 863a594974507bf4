"""Whether a challenger answers as well as the champion beside it: its errors and its latency, not what it says.

What it says was judged when it was a candidate (`kind: promote`); a served answer has nothing to be compared with.
"""

from __future__ import annotations

from collections.abc import Iterator

from stages.serving.tally import Tally

MAX_MORE_ERRORS = 0.01
"""Of the requests."""
MAX_TIMES_SLOWER = 1.25
"""At the 95th percentile."""


def have_answered(num_requests: int, *tallies: Tally) -> bool:
    """Whether each has had so many requests, errors included."""
    return all(tally.num_requests >= num_requests for tally in tallies)


def misses(challenger: Tally, champion: Tally) -> Iterator[str]:
    """What is worse than allowed, in words."""
    shares = [tally.num_errors / tally.num_requests for tally in (challenger, champion)]
    if shares[0] > shares[1] + MAX_MORE_ERRORS:
        yield f"{shares[0]:.1%} of its requests failed, and {shares[1]:.1%} of the champion's"
    latencies_s = [tally.latency_s(95) for tally in (challenger, champion)]
    if latencies_s[0] and latencies_s[1] and latencies_s[0] > latencies_s[1] * MAX_TIMES_SLOWER:
        yield f"its p95 is {latencies_s[0]:.3g} s, and the champion's {latencies_s[1]:.3g} s"
