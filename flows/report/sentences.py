"""Sentences of a report: how the refresh ended, what that means for the model, and what its stages warned about."""

from collections.abc import Iterator, Sequence

from flows.ledger.record import COPIED, KILLED, AttemptRecord, RefreshRecord
from flows.report.history import history_warnings
from flows.report.layouts import Row
from flows.report.model import Promotion, Score, ScoreDifference
from stages.core.files import read_json_lines
from stages.kinds.registry import makes

STATES = {
    "cancelled": "was stopped",
    "not_promoted": "completed, but promoted nothing,",
    "waiting_for_approval": "completed, but its candidate waits for approval,",
}
UNSAID_ENDS = {KILLED: "was killed", COPIED: "was copied with its home while it ran,"}


def outcome_sentence(record: RefreshRecord) -> str:
    """Return a sentence on how the refresh ended, with the number of stages in each state."""
    stages = f"of {len(record.stages)} stages: {record.state_counts}"
    what = f"comparison of layouts of {record.comparison.stage}" if record.comparison else f"refresh of {record.recipe}"
    if record.state == "running" and not record.killed:
        return f"The {what} is running; {stages}."
    state = UNSAID_ENDS.get(record.unsaid_end or "", STATES.get(record.state, record.state))
    number = f" in its try {record.num_tries}" if record.num_tries > 1 else ""
    ended = f"{state}{number} after {record.seconds:.1f} s"
    return f"The {what} {ended}; {stages}."


def fastest_layout_sentence(layouts: Sequence[Row]) -> str:
    """Return a sentence on the fastest layout of a comparison."""
    rates = [(row.metrics["tokens_per_s"], row.text) for row in layouts if "tokens_per_s" in row.metrics]
    if not rates:
        return "No layout was measured."
    rate, text = max(rates)
    return f"The fastest layout is {text}: {rate:,.0f} tokens/s."


def result_sentence(record: RefreshRecord, promotions: Sequence[Promotion], scores: Sequence[Score]) -> str:
    """Return a sentence on the result of a refresh: whether there is a new champion, else failures or a score."""
    if record.unsaid_end == COPIED:
        return "How it ended, only the original home knows; a retry here goes on from what was built before the copy."
    failed = [name for name, entry in record.stages.items() if entry.state == "failed"]
    if failed and not (promotions and all(makes(record.stages[name].kind, "publication") for name in failed)):
        return f"There is no new model: {', '.join(failed)} failed, so what stands on that was not built."
    if record.state in ("running", "cancelled") or record.killed:
        return "There is no result yet: what is built stays, and a retry goes on from there."
    if promotions:
        return " ".join([*(_promotion(one, scores) for one in promotions), *_publications(record)])
    if record.nothing_new:
        return "Nothing has changed since it was built last, so every result stands as it was."
    if scores:
        return f"No stage promotes a model; the last score is {_score(scores[-1])}."
    return "Nothing was evaluated and no stage promotes a model, so nothing says yet how good the result is."


def _publications(record: RefreshRecord) -> Iterator[str]:
    """Yield a sentence on each publishing stage's target or failure. A failure does not undo a promotion."""
    for name, entry in record.stages.items():
        tags = entry.result.tags
        if makes(entry.kind, "publication") and entry.state == "failed":
            yield f"It is not published: {name} failed, and `lifecycle retry` tries that again."
        elif tags.get("publication") in ("published", "was there"):
            yield f"It is published at {tags['published_to']}."


def _promotion(promotion: Promotion, scores: Sequence[Score]) -> str:
    name = promotion.name
    if promotion.outcome == "promoted":
        text = f"The candidate is the new champion of {name}"
        text += f"; it {promotion.approval}" if promotion.approval else ""
    elif promotion.outcome == "already champion":
        text = f"The champion of {name} stays what it was: the candidate is the very same model"
    elif promotion.approval:
        text = f"The champion of {name} stays what it was: the candidate kept every gate, and {promotion.approval}"
    else:
        text = f"The champion of {name} stays what it was: the candidate missed {'; '.join(promotion.missed)}"
    if promotion.differences:
        text += f"; against {promotion.against}, " + ", ".join(map(_difference, promotion.differences[:2]))
    elif scores:
        text += f"; its score is {_score(scores[-1])}, and there was nothing to compare it with"
    return f"{text}."


def _difference(score: ScoreDifference) -> str:
    if score.nothing_solved:
        return f"{score.name}: neither solved any of {score.nothing_solved} samples, so nothing says which is better"
    low, high = score.interval
    clear = "no clear difference" if low <= 0 <= high else "a clear difference"
    return f"{score.name} {score.difference:+.4g} (95% interval {low:+.4g} to {high:+.4g}: {clear})"


def _score(score: Score) -> str:
    error = "" if score.standard_error is None else f" ± {score.standard_error:.2g}"
    return f"{score.name} {score.value:.4g}{error} ({score.stage})"


def warnings_of(record: RefreshRecord) -> list[str]:
    """Return warnings of stages built here (`STAGE, …: message`, each once), of repeated attempts, and of changes."""
    stages: dict[str, list[str]] = {}
    for name, entry in record.stages.items():
        file = entry.artifact / "events.jsonl" if entry.state == "built" and entry.artifact else None
        events = read_json_lines(file) if file and file.is_file() else []
        for message in {event["message"]: None for event in events if event["event"] == "warning"}:
            stages.setdefault(message, []).append(name)
    warned = [f"{', '.join(names)}: {message}" for message, names in stages.items()]
    retried = (text for attempt in record.latest_try if (text := _retry_warning(attempt)))
    return [*warned, *retried, *history_warnings(record)]


def _retry_warning(attempt: AttemptRecord) -> str | None:
    """Return a warning with the error if a stage was tried again after this attempt; None if it was not."""
    if not (attempt.ended and attempt.ended.retried):
        return None
    how = "was killed" if attempt.outcome == "killed" else "failed"
    reason = next(iter((attempt.ended.error or "").splitlines()), "")
    return f"{attempt.began.stage}: attempt {attempt.began.number} {how}, tried again: {reason}"
