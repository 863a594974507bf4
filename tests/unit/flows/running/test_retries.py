"""Failed stages are retried only if that may help; otherwise the error says why they are not."""

from types import SimpleNamespace

import pytest

from flows.running.retries import Retries
from stages.core.errors import StageCrashError, TransientError


def planned(progress, retries=2):
    """Return a fake train stage whose newest checkpoint after each crash is at the next step of `progress`."""
    reached = iter(progress)
    config = SimpleNamespace(execution=SimpleNamespace(retries=retries), progress_kept=lambda folder: next(reached))
    return SimpleNamespace(name="sft", kind="train", resume_key="0" * 12, config=config)


@pytest.fixture
def retries(store):
    return Retries(store)


def death():
    return StageCrashError("sft was killed by SIGKILL\nits log ends with:\n  step 5", died=True)


def test_a_second_death_without_a_newer_checkpoint_says_why_it_is_not_tried_again(retries):
    stage, second = planned([5, 5]), death()
    assert retries.decide(stage, 1, death())
    for _ in range(2):  # each caller gets the same answer, and the reason is said once
        assert not retries.decide(stage, 2, second)
    said = "it is not tried again: it died twice without a newer checkpoint between"
    assert str(second) == f"sft was killed by SIGKILL; {said}\nits log ends with:\n  step 5"


def test_a_death_after_the_last_retry_says_so(retries):
    stage, last = planned([5, 10], retries=1), death()
    assert retries.decide(stage, 1, death())
    assert not retries.decide(stage, 2, last)
    assert "SIGKILL; it is not tried again: execution.retries is 1\n" in str(last)


def test_other_errors_stay_as_they_are(retries):
    stage = planned([], retries=1)
    for number, is_retried in ((1, True), (2, False)):
        error = TransientError("the hub is away")
        assert retries.decide(stage, number, error) is is_retried
        assert str(error) == "the hub is away"
