"""The canary gate limits how much worse a challenger's error rate and latency may be than the champion's."""

import pytest

from flows.champion.follow import exceeded_limits, have_answered
from stages.serving.exchange import Exchange
from stages.serving.tally import Tally


def tally(latencies_s=(), num_errors=0):
    found = Tally()
    for status, seconds in [*((200, one) for one in latencies_s), *[(500, 9.0)] * num_errors]:
        exchange = Exchange({})
        exchange.status = status
        found.count("/v1/chat/completions", exchange, seconds)
    return found


@pytest.mark.parametrize(
    ("challenger", "champion", "said"),
    [
        (tally([1.0] * 100), tally([1.0] * 100), ""),
        (tally([1.25] * 100), tally([1.0] * 100), ""),
        (tally([1.26] * 100), tally([1.0] * 100), "its p95 is 1.26 s, and the champion's 1 s"),
        (tally([1.0] * 90 + [5.0] * 10), tally([1.0] * 100), "its p95 is 5 s, and the champion's 1 s"),
        (tally([1.0] * 99, 1), tally([1.0] * 100), ""),
        (tally([1.0] * 98, 2), tally([1.0] * 100), "2.0% of its requests failed, and 0.0% of the champion's"),
        (tally([1.0] * 98, 2), tally([1.0] * 99, 1), ""),
        (tally([], 100), tally([1.0] * 100), "100.0% of its requests failed, and 0.0% of the champion's"),
        (tally([], 100), tally([], 100), ""),
    ],
)
def test_only_more_errors_and_longer_waits_than_the_champion_has_count(challenger, champion, said):
    assert "; ".join(exceeded_limits(challenger, champion)) == said


def test_both_must_have_been_asked_often_enough():
    assert have_answered(3, tally([1.0] * 2, 1), tally([1.0] * 4))
    assert not have_answered(3, tally([1.0] * 2), tally([1.0] * 4))
    assert not have_answered(3, tally([1.0] * 4), tally())
