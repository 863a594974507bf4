"""The report of a pipeline run that publishes a model: a failed publication does not undo the promotion."""

from flows.ledger.record import StageEntry
from flows.report.evaluations import promotions, scores
from flows.report.sentences import result_sentence
from stages.core.contract import StageResult


def said(record, **entry):
    record.stages["publish"] = StageEntry(kind="publish", version="0" * 12, **entry)
    return result_sentence(record, list(promotions(record)), list(scores(record)))


def test_a_publication_that_failed_leaves_the_champion_what_it_is(night):
    text = said(night.refresh(), state="failed", error="no such owner")
    assert text.startswith("The candidate is the new champion of adder")
    assert text.endswith("It is not published: publish failed, and `lifecycle retry` tries that again.")


def test_a_publication_says_where_it_is(night):
    tags = {"publication": "published", "published_to": "hf://owner/adder"}
    text = said(night.refresh(), state="built", built=StageResult(tags=tags))
    assert text.endswith("It is published at hf://owner/adder.")


def test_a_place_that_is_refused_before_anything_runs_means_no_model(night):
    text = said(night.refresh(failing="sft"), state="failed")
    assert text == "There is no new model: sft, publish failed, so what stands on that was not built."
